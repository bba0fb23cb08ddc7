"""Moves tensors between RaggedShard and the other placements of a one-dimensional mesh, one collective each.

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

from vescale_compile.ragged.dtensor import RaggedDTensor, check_layout, row_major_strides
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.torch_internals import all_gather_single

c10d = torch.ops._c10d_functional

Intervals = tuple[tuple[int, int], ...]


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
        intervals = target.intervals(shape)
        start, stop = intervals[rank]
        if isinstance(source, Replicate):
            # A copy: a view would keep the whole tensor's memory.
            local = local.reshape(-1)[start:stop].clone()
        elif isinstance(source, Partial):
            local = _reduce_scatter(local.reshape(-1), intervals, rank, source.reduce_op, group)
        else:
            if isinstance(source, Shard) and source.dim != 0:
                return _move(tensor.redistribute(mesh, [Shard(0)]), target)
            local = _all_to_all(local.reshape(-1), _intervals(source, mesh, shape), intervals, rank, group)
        return RaggedDTensor.from_local(local, mesh, [target], shape=shape)

    if isinstance(target, Replicate):
        full = _all_gather(local, _intervals(source, mesh, shape), group).view(shape)
        return _dtensor(full, mesh, target, shape)
    if type(target) is Shard:
        if target.dim != 0:
            return _move(tensor, Shard(0)).redistribute(mesh, [target])
        intervals = _intervals(target, mesh, shape)
        rows = _all_to_all(local, _intervals(source, mesh, shape), intervals, rank, group)
        return _dtensor(rows.view(_shard_rows(mesh, shape)[rank], *shape[1:]), mesh, target, shape)
    raise NotImplementedError(
        f"redistribute from {source} to {target}: the target must be RaggedShard, Replicate, or Shard"
    )


def _dtensor(local: torch.Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=row_major_strides(shape))


def _shard_rows(mesh: DeviceMesh, shape: Sequence[int]) -> list[int]:
    """How many rows Shard(0) gives each rank: as torch.chunk, all equal but the last ones."""
    chunk = -(-shape[0] // mesh.size())
    return [min(max(shape[0] - rank * chunk, 0), chunk) for rank in range(mesh.size())]


def _intervals(placement: Placement, mesh: DeviceMesh, shape: Sequence[int]) -> Intervals:
    """Each rank's interval of the flattened tensor under a RaggedShard or Shard(0)."""
    if isinstance(placement, RaggedShard):
        return placement.intervals(shape)
    row = math.prod(shape[1:])
    stops = [rows * row for rows in itertools.accumulate(_shard_rows(mesh, shape), initial=0)]
    return tuple(itertools.pairwise(stops))


def _all_gather(local: torch.Tensor, intervals: Intervals, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole flat tensor on every rank; shards are padded to the largest, unless one is the whole.

    Not by the functional all-gather: over gloo that is a coalesced one, and PyTorch 2.13's two worker threads of a
    group both write the name of what they completed last, unlocked. A name of more than 15 characters, as that one's,
    is then freed twice, rarely, and the process dies.
    """
    sizes = [stop - start for start, stop in intervals]
    numel, largest = sum(sizes), max(sizes)
    if numel == 0:
        return local
    sent = _movable(local)
    if largest == numel:
        sent = sent if sent.numel() else sent.new_empty(numel)
        return c10d.wait_tensor(c10d.broadcast(sent, sizes.index(numel), group.group_name)).view(local.dtype)
    sent = F.pad(sent, (0, largest - sent.numel()))
    gathered = sent.new_empty(len(sizes) * largest)
    all_gather_single(gathered, sent, group=group)
    gathered = gathered.view(local.dtype)
    if largest * len(sizes) == numel:
        return gathered
    return torch.cat([gathered[rank * largest :][:size] for rank, size in enumerate(sizes)])


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
    full: torch.Tensor, intervals: Intervals, rank: int, reduce_op: str, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's slice of the reduction of every rank's `full` (flat); slices are padded to the largest."""
    sizes = [stop - start for start, stop in intervals]
    largest = max(sizes)
    if sum(sizes) == 0:
        return full
    if largest * len(sizes) != full.numel():
        full = torch.cat([F.pad(full[start:stop], (0, largest - stop + start)) for start, stop in intervals])
    reduced = c10d.wait_tensor(c10d.reduce_scatter_tensor(full.contiguous(), reduce_op, len(sizes), group.group_name))
    # Without its padding: a slice would keep it in memory.
    return reduced if sizes[rank] == largest else reduced[: sizes[rank]].clone()


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    return max(min(first[1], second[1]) - max(first[0], second[0]), 0)


def _movable(local: torch.Tensor) -> torch.Tensor:
    """Single bytes travel as uint8: gloo does not know the float8 types."""
    return local.view(torch.uint8) if local.dtype.itemsize == 1 else local
