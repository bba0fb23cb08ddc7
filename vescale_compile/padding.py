"""Says so where blocks that may not be cut make a model much larger: most ranks would hold padding."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from .planner import remedies
from .planner.plan import BufferPlan

_MUCH_PERCENT = 10.0
_MUCH_BYTES = 1 << 26


def warn_of_padding(plans: Mapping[str, Sequence[BufferPlan]]) -> None:
    """Warns once, on the first rank, if units together are padded by more than 10 % and 64 MiB.

    Args:
        plans: by name of each unit, its buffers.
    """
    buffers = [(name, plan) for name, unit in plans.items() for plan in unit]
    padding = sum(_padding_bytes(plan) for _, plan in buffers)
    percent = 100 * padding / max(sum(plan.numel * plan.itemsize for _, plan in buffers), 1)
    if dist.get_rank() != 0 or padding < _MUCH_BYTES or percent < _MUCH_PERCENT:
        return
    name, worst = max(buffers, key=lambda named: _padding_bytes(named[1]))
    largest = max(worst.tensors, key=lambda tensor: tensor.item.block)
    found = remedies(worst.tensors, worst.world_size)
    best = min(found, key=lambda remedy: remedy.padding_percent, default=None)
    helps = f"a 2-D mesh or larger units, at best {best}" if best is not None else "smaller blocks"
    warnings.warn(
        f"fully_shard: padding adds {percent:.0f} % to what is gathered and reduced, and to the ranks' shards "
        f"({padding / 1e9:.2f} GB in all). Blocks that may not be cut are large for {worst.world_size} ranks: "
        f"in unit {name}, parameter {largest.name!r} has blocks of {largest.item.block:,} elements, where a rank's "
        f"share of the unit is {worst.numel // worst.world_size:,}. What helps: {helps}.",
        stacklevel=3,
    )


def _padding_bytes(plan: BufferPlan) -> int:
    return plan.padding_numel * plan.itemsize
