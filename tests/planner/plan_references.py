"""Slow references for the planner, from the definitions alone, and strategies for random instances."""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

from hypothesis import strategies as st

from vescale_compile.planner import TensorSpec, UnitPlan
from vescale_compile.planner.layout import Item, place_in_order


def is_valid(start: int, item: Item, shard: int) -> bool:
    """Whether every shard boundary inside the item lies whole blocks after its start."""
    boundaries = range((start // shard + 1) * shard, start + item.numel, shard)
    return all((boundary - start) % item.block == 0 for boundary in boundaries)


def all_layouts(items: Sequence[Item], shard: int, limit: int, position: int = 0) -> Iterator[tuple[int, ...]]:
    """Every valid layout of the items in the order given, as starts."""
    if not items:
        yield ()
        return
    for start in range(position, limit - items[0].numel + 1):
        if is_valid(start, items[0], shard):
            for rest in all_layouts(items[1:], shard, limit, start + items[0].numel):
                yield (start, *rest)


def fits(items: Sequence[Item], shard: int, limit: int) -> bool:
    """Whether the items fit in the order given, each at the first valid start that a linear scan finds."""
    position = 0
    for item in items:
        start = next((s for s in range(position, limit) if is_valid(s, item, shard)), limit)
        position = start + item.numel
    return position <= limit


def smallest_shard(items: Sequence[Item], world_size: int, alignment: int, *, keep_order: bool = False) -> int:
    """The optimum: tries every shard size and every order."""
    orders = [tuple(items)] if keep_order else sorted(set(permutations(items)))
    shard = -(-sum(item.numel for item in items) // (world_size * alignment)) * alignment  # in less they have no room
    while not any(fits(order, shard, world_size * shard) for order in orders):
        shard += alignment
    return shard


def published_shard(items: Sequence[Item], world_size: int, alignment: int) -> int:
    """The algorithm of arXiv 2602.22437: largest tensors first, S a multiple of the LCM of a prefix.

    For each prefix, a binary search over the multiples with the placement of the fixed order as the check.
    """
    order = sorted(items, reverse=True)
    whole = sum(item.numel for item in items)
    best = -(-whole // alignment) * alignment
    for size in range(len(order) + 1):
        step = math.lcm(alignment, *(item.block for item in order[:size]))
        low, high = 0, best // step + 1
        while high - low > 1:
            middle = (low + high) // 2
            if place_in_order(order, middle * step, world_size * middle * step) is None:
                low = middle
            else:
                high = middle
        if high * step < best and place_in_order(order, high * step, world_size * high * step) is not None:
            best = high * step
    return best


def check_plan(plan: UnitPlan, unit: Sequence[TensorSpec], world_size: int, alignment_bytes: int) -> None:
    """Every tensor lies once in one buffer, none over another, no block cut, in aligned shards above their bound."""
    assert sorted(t.name for b in plan.buffers for t in b.tensors) == sorted(t.name for t in unit)
    for buffer in plan.buffers:
        shard = buffer.shard_numel
        assert shard * buffer.tensors[0].itemsize % alignment_bytes == 0
        assert buffer.lower_bound <= shard
        owner = [None] * (world_size * shard)
        for tensor in buffer.tensors:
            for element in range(tensor.numel):
                place = buffer.offsets[tensor.name] + element
                assert owner[place] is None, "two tensors overlap"
                owner[place] = (tensor.name, element // tensor.block_numel)
        for boundary in range(shard, world_size * shard, shard):
            before, after = owner[boundary - 1], owner[boundary]
            assert before is None or before != after, "a block is cut"
        assert buffer.padding_numel == owner.count(None)


@st.composite
def items(draw: st.DrawFn, most_numel: int = 20) -> Item:
    """An item of at most ``most_numel`` elements."""
    numel = draw(st.integers(1, most_numel))
    return Item(numel, draw(st.integers(1, numel)))
