"""Which elements of a unit one kernel steps: parameters that lie next to each other in memory become one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .adamw8bit_kernel import Codebooks, Coefficients, run_compiled, step_blocks, step_elements
from .adamw8bit_state import CODED, DENSE, Member
from .blocks import Rectangle, rectangles
from .units import local_elements, local_grad


@dataclass(frozen=True)
class Run:
    """Blocks, or single elements, that lie at equal distances in memory.

    Attributes:
        tensors: where the run begins in the parameters, gradients and states, each in a tensor of one dimension.
        lengths: how many elements of each the run's parameters have.
        rectangle: the blocks; None for elements with float32 states.
    """

    tensors: tuple[Tensor, ...]
    lengths: tuple[int, ...]
    rectangle: Rectangle | None

    def joined(self, following: Run) -> Run | None:
        """Both runs as one; None if memory does not go on from one to the other, or the blocks differ."""
        pairs = zip(self.tensors, self.lengths, following.tensors, strict=True)
        if len(self.tensors) != len(following.tensors) or not all(_goes_on(*pair) for pair in pairs):
            return None
        rectangle, other = self.rectangle, following.rectangle
        if rectangle is not None and other is not None:
            if not rectangle.whole or rectangle != replace(other, rows=rectangle.rows):
                return None
            rectangle = replace(rectangle, rows=rectangle.rows + other.rows)
        lengths = tuple(a + b for a, b in zip(self.lengths, following.lengths, strict=True))
        return Run(self.tensors, lengths, rectangle)

    def step(self, by: Coefficients, *, compile: bool) -> None:
        """Runs the kernel. Blocks at a tensor's edge are few and of many sizes: they are stepped without compiling."""
        device, r = self.tensors[0].device, self.rectangle
        function: Callable[..., None] = step_elements
        books: tuple[Codebooks, ...] = ()
        if r is None:
            views = [_strided(t, (n,), (1,), 0) for t, n in zip(self.tensors, self.lengths, strict=True)]
        else:
            views = [_strided(t, r.size, r.stride, r.start) for t in self.tensors[:4]]
            views += [_strided(t, r.scale_size, r.scale_stride, r.scale_start) for t in self.tensors[4:]]
            function, books = step_blocks, (Codebooks.on(device),)
        if compile and (r is None or r.whole):
            run_compiled(function, views, by, *books)
        else:
            function(views, by.for_operators(device), *books)


def runs_of(unit: Sequence[Member], states: Sequence[Mapping[str, Tensor]], *, join: bool) -> list[Run]:
    """The runs of a unit's parameters, which are in the order of the unit's memory.

    Args:
        unit: parameters with gradients.
        states: theirs.
        join: False gives every parameter runs of its own.
    """
    runs: list[Run] = []
    for run in (run for pair in zip(unit, states, strict=True) for run in _member_runs(*pair)):
        joined = runs[-1].joined(run) if join and runs else None
        if joined is None:
            runs.append(run)
        else:
            runs[-1] = joined
    return runs


def _member_runs(member: Member, state: Mapping[str, Tensor]) -> Iterable[Run]:
    param, grad = local_elements(member.param), local_grad(member.param)
    if param.numel() == 0:
        return ()
    names = DENSE if member.grid is None else CODED
    tensors = (param, grad, *(local_elements(state[name]) for name in names))
    lengths = tuple(tensor.numel() for tensor in tensors)
    if member.grid is None:
        return (Run(tensors, lengths, None),)
    return (Run(tensors, lengths, rectangle) for rectangle in rectangles(member.grid, param.numel()))


def _goes_on(first: Tensor, length: int, following: Tensor) -> bool:
    return (
        following.storage_offset() == first.storage_offset() + length
        and following.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and following.dtype == first.dtype
    )


def _strided(tensor: Tensor, size: Sequence[int], stride: Sequence[int], start: int) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + start)
