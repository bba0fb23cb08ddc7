"""``plan_unit``: from the tensors of one unit to its buffers."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from vescale_compile.planner.layout import Item, Layout
from vescale_compile.planner.plan import BufferPlan, UnitPlan
from vescale_compile.planner.spec import TensorSpec
from vescale_compile.planner.split import split

_content = attrgetter("item", "itemsize")


def plan_unit(
    tensors: Sequence[TensorSpec],
    world_size: int,
    *,
    alignment_bytes: int = 16,
    keep_order: bool = False,
) -> UnitPlan:
    """Places the tensors of one unit in buffers of ``world_size`` equal shards with little padding.

    No block is cut, a tensor is contiguous, and padding lies only between tensors and at the end, as in the
    planner of veScale-FSDP (arXiv 2602.22437). Tensors share one buffer unless their itemsizes differ or
    blocks that do not suit one another would inflate the shards. The result depends on the arguments alone,
    so every rank that plans the same unit gets the same plan; units of equal content share one search.

    Args:
        tensors: what the unit holds, at least one tensor; names are unique.
        world_size: number of ranks that share each buffer.
        alignment_bytes: a rank's bytes in each buffer are a multiple of this (16: NCCL's fast path).
        keep_order: within each buffer the tensors lie in the order given; otherwise the planner chooses it.

    Returns:
        One buffer or several: of each its tensors with their offsets, and its padding.

    Raises:
        ValueError: no tensors, a name given twice, or a world size or alignment below 1.
    """
    if not tensors:
        raise ValueError("plan_unit: a unit needs at least one tensor")
    for name, value in (("world_size", world_size), ("alignment_bytes", alignment_bytes)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"plan_unit: {name} is {value}; it must be an int of at least 1")
    pieces = plan_content(tuple(map(_content, tensors)), world_size, alignment_bytes, keep_order)
    return UnitPlan(
        tuple(BufferPlan(tuple(map(tensors.__getitem__, indices)), layout, bound) for indices, layout, bound in pieces)
    )


@lru_cache(maxsize=1024)
def plan_content(
    content: tuple[tuple[Item, int], ...], world_size: int, alignment_bytes: int, keep_order: bool
) -> tuple[tuple[tuple[int, ...], Layout, int], ...]:
    """For each buffer: its items as positions in ``content``, in buffer order, its layout and its bound."""
    pieces = []
    for itemsize in dict.fromkeys(size for _, size in content):
        alignment = alignment_bytes // math.gcd(alignment_bytes, itemsize)
        waiting: dict[Item, deque[int]] = defaultdict(deque)
        for index, (item, size) in enumerate(content):
            if size == itemsize:
                waiting[item].append(index)
        items = [item for item, size in content if size == itemsize]
        for found in split(items, world_size, alignment, itemsize=itemsize, keep_order=keep_order):
            layout = Layout(found.items, found.starts, world_size, found.shard, alignment)
            pieces.append((tuple(waiting[item].popleft() for item in found.items), layout, found.bound))
    return tuple(pieces)
