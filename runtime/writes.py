"""Writes to shards between where they are gathered and where they are read.

Whether such a gather is repeated must be the same on every rank. So what counts is what a program writes to a sharded
parameter, or to a view or an alias of one: all ranks do, also those that hold nothing of it. What one writes to the
elements that it holds itself (``to_local()``) the others can't know of, and it is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor


class Watch:
    """Of shards, from now on, for as long as it is kept."""

    def __init__(self, shards: Sequence[Tensor]) -> None:
        self._shards, self._versions = shards, [version_of(shard) for shard in shards]
        self._memory = {memory_of(shard) for shard in shards}
        self.written = False  # by all ranks
        _watching.add(self)

    def is_stale(self) -> bool:
        """Whether any was written to meanwhile.

        Raises:
            RuntimeError: this rank has written to elements of its own alone.
        """
        if not self.written and self._versions != [version_of(shard) for shard in self._shards]:
            raise RuntimeError(
                f"[rank {dist.get_rank()}] what to_local() gives of a parameter was written to inside a forward or a "
                "backward, when the parameter was being gathered for the layer that comes next. Other ranks can't know "
                "of it: write to the parameter itself, on all ranks, or between steps"
            )
        return self.written

    def see(self, written: Iterable[Tensor]) -> None:
        self.written = self.written or any(memory_of(each) in self._memory for each in written)


_watching: WeakSet[Watch] = WeakSet()


def count_writes(written: Iterable[Tensor]) -> None:
    """Says that all ranks have written to sharded tensors, of which these are this rank's elements."""
    for watch in tuple(_watching):  # of several GPUs' backwards each has a thread
        watch.see(written)


def version_of(tensor: Tensor) -> int:
    """Changes with each write that PyTorch counts; nobody counts those to a tensor that was made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
