"""A process group whose collectives do nothing: for what one rank of many allocates, launches and takes.

PyTorch's fake one nearly is: its gathers alone copy a rank's own part to every other's place, in as many launches as
there are ranks, which on a GPU take longer than the launch of a gather does.
"""

from __future__ import annotations

import functools
import warnings

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.library import Library
from torch.testing._internal.distributed.fake_pg import FakeStore


def join(world_size: int) -> None:
    """Makes this process rank 0 of that many."""
    _have_gathers_do_nothing()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@functools.cache
def _have_gathers_do_nothing() -> Library:
    """Of this process, whatever the process group; profiles see their operators as before."""
    library = Library("c10d", "IMPL")
    work = FakeWork()

    def gather(output: Tensor, *_: object) -> tuple[Tensor, object]:
        return output, work.boxed()

    def gather_several(*_: object) -> object:
        return work.boxed()

    with warnings.catch_warnings(action="ignore"):  # that they had kernels
        for device in ("CPU", "CUDA"):
            library.impl("_allgather_base_", gather, device)
            library.impl("allgather_into_tensor_coalesced_", gather_several, device)
    return library
