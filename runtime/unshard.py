"""All-gather a unit's shards and view the parameters in the result; backward, pack and reduce-scatter.

One autograd function for the whole unit: left to autograd, the backward of each parameter's view would be a
buffer of zeros as large as the unit, and an addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops, quantized_ops


class ParamView(NamedTuple):
    """Where a parameter lies in the gathered buffer.

    A named tuple of plain values, so that it can be an argument of a graph node and is readable in a dump.
    """

    offset: int  # first element, counted in the buffer of world_size * S elements
    shape: tuple[int, ...]
    trainable: bool  # whether a gradient is wanted

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class CommSpec(NamedTuple):
    """How a unit communicates: everything about its collectives that is not a tensor."""

    unit: int  # ordinal of the unit's buffer among the inputs of one graph; outside graphs, the buffer's number
    world_size: int
    group: str
    replicas: str  # the group that the reduced gradient is averaged over besides, "" for none
    param_dtype: torch.dtype  # of the gathered buffer
    reduce_dtype: torch.dtype  # of the buffer that is reduced
    reduce_scratch: int  # elements that a reduction needs besides its input and output
    packing: str = ""  # of gathers that are quantized, as a key; "" for others
    packed_bytes: int = 0  # of the buffer that is gathered then
    gradient_packing: str = ""  # of reductions that are quantized
    packed_gradient_bytes: int = 0
    coalesces: bool = False  # whether it may share collectives with other units of the group
    exchanges: bool = False  # whether ranks send each other their parts, instead of a collective of the backend
    replica_count: int = 1  # ranks of the group of replicas


def unshard(
    shard: Tensor,
    reductions: Tensor | None,
    views: Sequence[ParamView],
    comm: CommSpec,
    others: Sequence[ParamView] = (),
    found: list[int] | None = None,
) -> tuple[Tensor, ...]:
    """Returns the full parameters of a unit, as views of one gathered buffer.

    Args:
        shard: this rank's flat shard, [S], in the parameters' own dtype. Cast, or quantized, once, before the gather.
            The backward reduce-scatters the gradient (averaged over the ranks) into one of it, [S].
        reductions: handle of the unit's ``Reductions``, where gradients may accumulate, or are quantized; else None.
        views: the parameters wanted.
        comm: sizes, dtypes and process group.
        others: the unit's other parameters, which are not wanted here, and may be on another rank.
        found: outside graphs, a list that after each backward says which of ``views`` had gradients.

    Returns:
        One tensor of ``param_dtype`` for each of ``views``.
    """
    return _Unshard.apply(shard, reductions, tuple(views), comm, tuple(others), found)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        reductions: Tensor | None,
        views: tuple[ParamView, ...],
        comm: CommSpec,
        others: tuple[ParamView, ...],
        found: list[int] | None,
    ) -> tuple[Tensor, ...]:
        gathered = _all_gather(shard, comm)
        params = tuple(gathered.narrow(0, view.offset, view.numel).view(view.shape) for view in views)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(param for param, view in zip(params, views, strict=True) if not view.trainable))
        ctx.views, ctx.comm, ctx.reductions, ctx.others, ctx.found = views, comm, reductions, others, found
        ctx.shard_numel, ctx.shard_dtype = shard.numel(), shard.dtype
        return params

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        comm: CommSpec = ctx.comm
        found = sorted(
            (view.offset, index, grad)
            for index, (view, grad) in enumerate(zip(ctx.views, grads, strict=True))
            if grad is not None
        )
        if not found:
            return (None,) * 6
        offsets, indices, present = (list(column) for column in zip(*found, strict=True))
        if ctx.found is not None:
            ctx.found[:] = indices
        numel = ctx.shard_numel * comm.world_size
        absent = [view for view, grad in zip(ctx.views, grads, strict=True) if grad is None]
        unused = _unused(offsets, [*absent, *ctx.others])
        packed = ops.pack(present, offsets, indices, unused, numel, comm.reduce_dtype, comm.unit)
        return reduce_scatter(packed, ctx.reductions, comm).to(ctx.shard_dtype), None, None, None, None, None


def _unused(used: Sequence[int], absent: Sequence[ParamView]) -> list[int]:
    """First element and number of elements, in turn, of each run of parameters with no gradient.

    Args:
        used: offsets of the parameters that have one.
        absent: the unit's other parameters.
    """
    places = [(offset, 0) for offset in used] + [(view.offset, view.numel) for view in absent]
    found: list[int] = []
    joins = False  # whether a parameter without a gradient lies before
    for offset, numel in sorted(places):
        if numel and joins:
            found[-1] = offset + numel - found[-2]
        elif numel:
            found += [offset, numel]
        joins = numel > 0
    return found


def _all_gather(shard: Tensor, comm: CommSpec) -> Tensor:
    if comm.packing:
        where = (comm.unit, comm.world_size, comm.group)
        return quantized_ops.all_gather_quantized(shard, *where, comm.param_dtype, comm.packing)
    return ops.all_gather(shard.to(comm.param_dtype), comm.unit, comm.world_size, comm.group)


def reduce_scatter(packed: Tensor, reductions: Tensor | None, comm: CommSpec) -> Tensor:
    """Averages a unit's gradient [world_size * S] over the ranks; returns this rank's [S], in ``reduce_dtype``."""
    where = (comm.unit, comm.group, comm.replicas)
    if comm.gradient_packing:
        return quantized_ops.reduce_scatter_quantized(packed, *where, comm.gradient_packing, reductions)
    return ops.reduce_scatter(packed, *where, reductions)
