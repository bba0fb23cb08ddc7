"""A process group that sends nothing: for what one rank of many allocates, launches and takes.

As in PyTorch's fake one, a gather brings this rank's part to the place of every other's, so that what is computed has
values like a model's; there it does so in as many launches as there are ranks, which on a GPU take longer than the
launch of a gather does, and here in one, on the stream that it was called on. A reduction gives this rank its own part.
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
    _replace_collectives()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


@functools.cache
def _replace_collectives() -> Library:
    """Of this process, whatever the process group; profiles see their operators as before."""
    library = Library("c10d", "IMPL")
    work = FakeWork()

    def gather(output: Tensor, part: Tensor, *_: object) -> tuple[Tensor, object]:
        in_place = part.data_ptr() == output.data_ptr()
        output.view(-1, part.numel())[in_place:].copy_(part.view(-1))
        return output, work.boxed()

    def gather_several(outputs: list[Tensor], parts: list[Tensor], *_: object) -> object:
        for output, part in zip(outputs, parts, strict=True):
            gather(output, part)
        return work.boxed()

    def reduce_scatter(output: Tensor, whole: Tensor, *_: object) -> tuple[Tensor, object]:
        if output.data_ptr() != whole.data_ptr():
            output.view(-1).copy_(whole.view(-1)[: output.numel()])
        return output, work.boxed()

    def reduce_scatter_several(outputs: list[Tensor], wholes: list[Tensor], *_: object) -> object:
        for output, whole in zip(outputs, wholes, strict=True):
            reduce_scatter(output, whole)
        return work.boxed()

    with warnings.catch_warnings(action="ignore"):  # that they had kernels
        for device in ("CPU", "CUDA"):
            library.impl("_allgather_base_", gather, device)
            library.impl("allgather_into_tensor_coalesced_", gather_several, device)
            library.impl("_reduce_scatter_base_", reduce_scatter, device)
            library.impl("reduce_scatter_tensor_coalesced_", reduce_scatter_several, device)
    return library
