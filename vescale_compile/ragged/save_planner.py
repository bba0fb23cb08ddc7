"""A planner of checkpoints for thousands of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from ..torch_internals.checkpoint import checked_already


class SavePlanner(DefaultSavePlanner):
    """For ``torch.distributed.checkpoint.save(..., planner=)``: its default, but for how pieces are checked.

    The default compares, on one rank while the others wait, nearly every two pieces of a tensor whose longest dimension
    is its last, as a stack of experts often is: for thousands of ranks longer than a collective may take. This one
    sorts pieces that are runs of elements, and leaves to the default what is not made of such. Checkpoints are the
    same.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with checked_already(_is_whole):
            return super().create_global_plan(all_plans)


def _is_whole(stored: TensorStorageMetadata) -> bool:
    """Whether a tensor's pieces are runs of its elements, row-major, that follow one another from first to last."""
    end = 0
    for start, stop in sorted(_run(chunk, stored.size) for chunk in stored.chunks):
        if start != end:
            return False
        end = stop
    return end == math.prod(stored.size)


def _run(chunk: ChunkStorageMetadata, size: Sequence[int]) -> tuple[int, int]:
    """The first element of a box and the one after its last; an empty run before the tensor of one that is no run."""
    start, numel, stride, is_cut = 0, 1, 1, False
    for offset, length, whole in zip(reversed(chunk.offsets), reversed(chunk.sizes), reversed(size), strict=True):
        if offset < 0 or offset + length > whole or (is_cut and length != 1):
            return -1, -1
        is_cut = is_cut or length != whole
        start += offset * stride
        stride *= whole
        numel *= length
    return start, start + numel
