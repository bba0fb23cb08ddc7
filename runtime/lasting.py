"""Parameters that last over the micro-batches of a step, which are gathered once.

Where gradients accumulate, nothing writes to shards from one micro-batch to the next. So what a forward inside
``no_sync`` gathers and keeps for its backward (``reshard_after_forward=False``, or as a memory budget allows) stays,
and the forwards after it read the same memory, the last of them the first one outside: with its backward it is freed.
A step takes no more by it: where the most is held, at the end of a forward, all that is kept is there in any case.

Whether a gather is left out must be the same on every rank. It follows from what all ranks do: which forwards are
inside ``no_sync``, and what is written to sharded parameters meanwhile, which are then gathered again (``writes.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from ..torch_internals.autograd import in_backward
from .collectives import Pending
from .shards import buffer_of
from .writes import Watch

if TYPE_CHECKING:
    from .dbuffer import DBuffer

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Shards, each with what it is gathered into."""


@dataclass(eq=False)
class _Lasting:
    """What a unit's shard was gathered into."""

    shard: Tensor
    full: Tensor
    watch: Watch
    arrived: bool = False

    def is_of(self, shard: Tensor) -> bool:
        """Whether it holds what ``shard`` does."""
        return self.shard is shard and self.arrived and not self.watch.written()


_lasting: WeakKeyDictionary[DBuffer, _Lasting] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Arriving:
    """A gather of parameters that are to last."""

    pending: Pending
    lasting: Sequence[_Lasting]

    def wait(self) -> None:
        self.pending.wait()
        for each in self.lasting:
            each.arrived = True


def lasting_memory(shard: Tensor) -> Tensor | None:
    """What an earlier micro-batch has gathered ``shard`` into, [world_size * S]; None if that is to be done anew, into
    other memory: backwards may yet read this.

    Raises:
        RuntimeError: this rank alone has written to the shard since.
    """
    buffer = buffer_of(shard)
    lasting = _lasting.pop(buffer, None) if buffer is not None else None
    if buffer is None or lasting is None or not lasting.is_of(buffer.shard):
        return None
    _lasting[buffer] = lasting
    return lasting.full


def lasts(shard: Tensor) -> bool:
    """Whether :func:`lasting_memory` has something of it."""
    return lasting_memory(shard) is not None


def let_last(shard: Tensor, full: Tensor) -> None:
    """Has ``full``, into which ``shard`` is about to be gathered, serve the next micro-batch too, if there is one."""
    buffer = buffer_of(shard)
    if buffer is not None and not buffer.sync.enabled and not in_backward():
        _lasting[buffer] = _Lasting(buffer.shard, full, Watch([buffer.shard], "between micro-batches of one step"))


def to_gather(pairs: Pairs) -> Pairs:
    """Those that earlier micro-batches have not gathered. What the last forward of a step finds lasts no longer."""
    if not _lasting:
        return pairs
    missing: list[tuple[Tensor, Tensor]] = []
    for shard, full in pairs:
        buffer = buffer_of(shard)
        lasting = _lasting_in(buffer, full)
        if buffer is None or lasting is None or not lasting.arrived:
            missing.append((shard, full))
        elif buffer.sync.enabled and not in_backward():  # a checkpointed region may run again
            drop(buffer)
    return missing


def as_they_arrive(pairs: Pairs, pending: Pending) -> Pending:
    """A gather of ``pairs`` that is in flight: those that are to last are there when it is over."""
    if not _lasting:
        return pending
    found = (_lasting_in(buffer_of(shard), full) for shard, full in pairs)
    arriving = [each for each in found if each is not None and not each.arrived]
    return _Arriving(pending, arriving) if arriving else pending


def lasting_bytes(buffers: Iterable[DBuffer]) -> int:
    """Of what lasts of these units."""
    return sum(lasting.full.nbytes for buffer in buffers if (lasting := _lasting.get(buffer)) is not None)


def drop(buffer: DBuffer) -> None:
    """Has nothing of a unit last any longer."""
    _lasting.pop(buffer, None)


def forget() -> None:
    """Of a process group that is gone."""
    _lasting.clear()


def _lasting_in(buffer: DBuffer | None, full: Tensor) -> _Lasting | None:
    """The unit's, if it is in that memory."""
    lasting = _lasting.get(buffer) if buffer is not None else None
    return lasting if lasting is not None and lasting.full.data_ptr() == full.data_ptr() else None
