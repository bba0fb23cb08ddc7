"""Says so where blocks that may not be cut make a model much larger: most ranks would hold padding."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .planner import remedies
from .planner.plan import BufferPlan

_MUCH_PERCENT = 10.0
_MUCH_BYTES = 1 << 26


def warn_of_padding(plans: Mapping[str, Sequence[BufferPlan]], mesh: DeviceMesh) -> None:
    """Warns once, on the first rank of the mesh, if units together are padded by more than 10 % and 64 MiB.

    Args:
        plans: by name of each unit, its buffers.
        mesh: of all ranks that have a part of them, or a copy.
    """
    buffers = [(name, plan) for name, unit in plans.items() for plan in unit]
    padding = sum(_padding_bytes(plan) for _, plan in buffers)
    percent = 100 * padding / max(sum(plan.numel * plan.itemsize for _, plan in buffers), 1)
    if any(mesh.get_coordinate() or ()) or padding < _MUCH_BYTES or percent < _MUCH_PERCENT:
        return
    name, worst = max(buffers, key=lambda named: _padding_bytes(named[1]))
    largest = max(worst.tensors, key=lambda tensor: tensor.item.block)
    alike = sum(any(_content(plan) == _content(worst) for plan in unit) for unit in plans.values())
    found = remedies(worst.tensors, worst.world_size, alike=alike)
    best = min(found, key=lambda remedy: remedy.padding_percent, default=None)
    kinds = "a 2-D mesh or larger units" if alike > 1 else "a 2-D mesh"
    helps = f"{kinds}, at best {best}" if best is not None else "smaller blocks"
    warnings.warn(
        f"fully_shard: padding adds {percent:.0f} % to what is gathered and reduced, and to the ranks' shards "
        f"({padding / 1e9:.2f} GB in all). Blocks that may not be cut are large for {worst.world_size} ranks: "
        f"in unit {name}, parameter {largest.name!r} has blocks of {largest.item.block:,} elements, where a rank's "
        f"share of the unit is {worst.numel // worst.world_size:,}. What helps: {helps}.",
        stacklevel=3,
    )


def _content(plan: BufferPlan) -> list[tuple[Any, ...]]:
    """What units have in common that could be joined."""
    return [(tensor.shape, tensor.itemsize, tensor.granularity) for tensor in plan.tensors]


def _padding_bytes(plan: BufferPlan) -> int:
    return plan.padding_numel * plan.itemsize
