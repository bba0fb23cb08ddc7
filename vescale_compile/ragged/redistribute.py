"""Moves tensors between RaggedShard and the other placements of a one-dimensional mesh, by one collective each.

A ragged shard and a Shard(0) shard are both one run of the row-major flattened tensor, in rank order. So
each rank's shard falls, uncopied and in order, into one piece for every rank of the target layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard, check_layout, row_major_strides
from vescale_compile.torch_internals.groups import all_gather_single
from vescale_compile.torch_internals.tracing import is_traced_to_operators

c10d = torch.ops._c10d_functional

Intervals = tuple[tuple[int, int], ...]


def distribute_ragged(full: torch.Tensor, device_mesh: DeviceMesh, placement: RaggedShard) -> RaggedDTensor:
    """This rank's share of a tensor that every rank holds whole: a copy of a slice, no communication.

    Differentiable: the gradient is gathered.
    """
    return to_ragged(DTensor.from_local(full, device_mesh, [Replicate()], run_check=False), placement)


def to_ragged(tensor: DTensor, placement: RaggedShard) -> RaggedDTensor:
    """A DTensor under a ragged placement of its mesh. Differentiable; every rank must call it.

    Args:
        tensor: a DTensor on a one-dimensional mesh, placed by Replicate (a slice, no communication),
            Shard(d) or RaggedShard (an all-to-all of what moves; Shard(d) with d > 0 becomes Shard(0)
            first), or by a Partial sum or average (a reduce-scatter).
        placement: one count of units for each rank of the mesh.
    """
    return redistribute(tensor, tensor.device_mesh, [placement])  # type: ignore[return-value]


def redistribute(tensor: DTensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor under another placement, where either of the two may be ragged. Differentiable.

    Raises:
        ValueError: another mesh, a mesh of more dimensions, or a placement that does not fit the shape.
        NotImplementedError: a placement that can't be converted.
    """
    source_mesh = tensor.device_mesh
    if source_mesh is not device_mesh and source_mesh != device_mesh:
        raise ValueError(f"redistribute from {source_mesh} to {device_mesh}: both must be the same mesh")
    if device_mesh.ndim != 1 or len(placements) != 1:
        raise ValueError(
            f"redistribute needs a one-dimensional mesh and one placement, got {device_mesh} and {placements}"
        )
    target = placements[0]
    if isinstance(target, RaggedShard):
        check_layout(device_mesh, placements, tensor.shape)
    elif isinstance(target, Shard) and target.dim < 0:
        target = Shard(target.dim + tensor.ndim)
    if target == tensor.placements[0]:
        return tensor
    return _Redistribute.apply(tensor, target)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, target: Placement) -> DTensor:
        # As DTensor's: the gradient of a Partial tensor is replicated.
        source = tensor.placements[0]
        ctx.source = Replicate() if isinstance(source, Partial) else source
        return _move(tensor, target)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return redistribute(grad, grad.device_mesh, [ctx.source]), None


def _move(tensor: DTensor, target: Placement) -> DTensor:
    mesh, shape, local, source = tensor.device_mesh, tensor.shape, tensor._local_tensor, tensor.placements[0]
    rank, group = mesh.get_local_rank(), mesh.get_group()

    if not isinstance(source, RaggedShard | Replicate | Partial) and type(source) is not Shard:
        raise NotImplementedError(f"redistribute from {source} to {target}: redistribute to Replicate first")

    if isinstance(target, RaggedShard):
        if isinstance(source, Replicate):
            # A copy: a view would keep the whole tensor's memory.
            start, stop = target.interval(shape, rank)
            local = local.reshape(-1)[start:stop].clone()
        elif isinstance(source, Partial):
            local = _reduce_scatter(local.reshape(-1), target.intervals(shape), rank, source.reduce_op, group)
        else:
            if isinstance(source, Shard) and source.dim != 0:
                return _move(tensor.redistribute(mesh, [Shard(0)]), target)
            local = _all_to_all(
                local.reshape(-1), _intervals(source, mesh, shape), target.intervals(shape), rank, group
            )
        if isinstance(tensor, RaggedDTensor):
            return tensor.placed(local, target, shape)
        return RaggedDTensor.from_local(local, mesh, [target], shape=shape)

    if isinstance(target, Replicate):
        _check_runs_now(tensor)
        full = _all_gather(local.reshape(-1), _intervals(source, mesh, shape), rank, group).view(shape)
        return _dtensor(full, mesh, target, shape)
    if type(target) is Shard:
        if target.dim != 0:
            return _move(tensor, Shard(0)).redistribute(mesh, [target])
        rows = _all_to_all(local, _intervals(source, mesh, shape), _intervals(target, mesh, shape), rank, group)
        return _dtensor(rows.view(_shard_rows(mesh, shape)[rank], *shape[1:]), mesh, target, shape)
    raise NotImplementedError(
        f"redistribute from {source} to {target}: the target must be RaggedShard, Replicate, or Shard"
    )


def _check_runs_now(tensor: DTensor) -> None:
    """Who compiles what sends into memory takes it to write nothing, and would return that memory as it was."""
    if is_traced_to_operators(tensor):
        raise RuntimeError(
            f"[rank {dist.get_rank()}] full_tensor() (or redistribute to Replicate) of a sharded tensor of shape "
            f"{tuple(tensor.shape)} is called in compiled code. Call it outside of what torch.compile compiles"
        )


def _dtensor(local: torch.Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=row_major_strides(shape))


def _shard_rows(mesh: DeviceMesh, shape: Sequence[int]) -> list[int]:
    """How many rows Shard(0) gives each rank: as torch.chunk, all equal but the last ones."""
    chunk = -(-shape[0] // mesh.size())
    return [min(max(shape[0] - rank * chunk, 0), chunk) for rank in range(mesh.size())]


def _intervals(placement: Placement, mesh: DeviceMesh, shape: Sequence[int]) -> Intervals:
    """Each rank's interval of the flattened tensor, under a RaggedShard or Shard(0)."""
    if isinstance(placement, RaggedShard):
        return placement.intervals(shape)
    row = math.prod(shape[1:])
    return tuple(itertools.pairwise(itertools.accumulate((n * row for n in _shard_rows(mesh, shape)), initial=0)))


def _sizes(intervals: Intervals) -> list[int]:
    return [stop - start for start, stop in intervals]


def _little_is_padding(sizes: Sequence[int]) -> bool:
    """Whether a collective of shares padded to the largest sends no more than an all-reduce: all elements twice.

    Of a parameter that few of many ranks hold, or one rank nearly all of, padding is up to a whole unit, of memory too,
    where an all-reduce takes no more than the tensor. Broadcasts or reductions, one for each rank that holds some,
    would send it once; but there may be hundreds, and each passes through all ranks.
    """
    return len(sizes) * max(sizes) <= 2 * sum(sizes)


def _all_gather(local: torch.Tensor, held: Intervals, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole flat tensor on every rank: broadcast if one rank holds it, gathered if little is padding, or else
    added up, of zeros everywhere but in one rank's shard.
    """
    sizes, numel = _sizes(held), held[-1][1]
    largest = max(sizes)
    if numel == 0:
        return local
    if largest < numel and _little_is_padding(sizes):
        return _gather_padded(local, sizes, group)
    whole = local.new_zeros(numel)
    whole[slice(*held[rank])] = local
    bits = whole.view(torch.uint8)  # of floats, -0.0 and NaNs would be changed by adding zero
    if largest == numel:
        dist.broadcast(bits, group=group, group_src=sizes.index(numel))
    else:
        dist.all_reduce(bits, group=group)
    return whole


def _gather_padded(local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The whole flat tensor, of shards that are padded to the largest.

    Not by the functional all-gather: over gloo that is a coalesced one, and PyTorch 2.13's two worker threads of a
    group both write the name of what they completed last, unlocked. A name of more than 15 characters, as that one's,
    is then freed twice, rarely, and the process dies.
    """
    largest = max(sizes)
    sent = F.pad(_movable(local), (0, largest - local.numel()))
    gathered = sent.new_empty(len(sizes) * largest)
    all_gather_single(gathered, sent, group=group)
    shards = gathered.view(local.dtype).view(len(sizes), largest)
    # There may be thousands of ranks: those that follow one another with as many elements are one piece.
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    of_runs = shards.split([ranks for _, ranks in runs])
    pieces = [rows[:, :size].reshape(-1) for (size, _), rows in zip(runs, of_runs, strict=True)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _all_to_all(
    local: torch.Tensor, source: Intervals, target: Intervals, rank: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's flat shard under `target`, from the one under `source`."""
    if source == target:
        return local.clone()
    sent = [_overlap(source[rank], interval) for interval in target]
    received = [_overlap(interval, target[rank]) for interval in source]
    moved = c10d.all_to_all_single(_movable(local.contiguous()), received, sent, group.group_name)
    return c10d.wait_tensor(moved).view(local.dtype)


def _reduce_scatter(
    full: torch.Tensor, held: Intervals, rank: int, reduce_op: str, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's slice of the reduction of every rank's `full` (flat): slices are padded to the largest, or, where
    that is much, all of it is reduced.
    """
    if full.numel() == 0:
        return full
    sizes = _sizes(held)
    if not _little_is_padding(sizes):
        reduced = c10d.wait_tensor(c10d.all_reduce(full.contiguous(), reduce_op, group.group_name))
        return reduced[slice(*held[rank])].clone()
    largest = max(sizes)
    if largest * len(sizes) != full.numel():
        full = torch.cat([F.pad(part, (0, largest - part.numel())) for part in full.split(sizes)])
    reduced = c10d.wait_tensor(c10d.reduce_scatter_tensor(full.contiguous(), reduce_op, len(sizes), group.group_name))
    # Without its padding: a slice would keep it in memory.
    return reduced if sizes[rank] == largest else reduced[: sizes[rank]].clone()


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    return max(min(first[1], second[1]) - max(first[0], second[0]), 0)


def _movable(local: torch.Tensor) -> torch.Tensor:
    """Single bytes travel as uint8: gloo does not know the float8 types."""
    return local.view(torch.uint8) if local.dtype.itemsize == 1 else local
