"""The smallest shard size that can be found for one buffer, and the order of its items.

Feasibility is not monotone in S, so no binary search is exact. The search tries, in ascending order, the
shard sizes that the structure of the blocks suggests, then bisects between the last failure and the first
success, then, where the buffer is small enough, rules out every smaller S one by one, which proves that its
answer is the smallest. To find the smallest S is NP-hard in general (it contains partition), hence budgets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from vescale_compile.planner.bound import Items, admissible_shards, divisors, shard_lower_bound
from vescale_compile.planner.layout import Item, ceil_to, earliest_start, place_aligned, place_in_order
from vescale_compile.planner.order import exact_order, greedy_order

HEURISTIC_BUDGET = 40_000
"""Placements of an item that the heuristics may try for one buffer (about a microsecond each)."""

EXACT_BUDGET = 150_000
"""Transitions of the exact dynamic program allowed for one buffer, all shard sizes together."""


@dataclass(frozen=True, slots=True)
class Found:
    """Items in buffer order, their starts, the shard size, and the proven lower bound on it."""

    items: tuple[Item, ...]
    starts: tuple[int, ...]
    shard: int
    bound: int


Packer = Callable[[int], Sequence[Item] | None]
"""From a shard size to the items in an order that fits, or ``None`` if it finds none."""


def search(items: Sequence[Item], world_size: int, alignment: int, *, keep_order: bool) -> Found:
    """The smallest S found for ``items`` in one buffer of ``world_size`` shards, and a layout of that S.

    Args:
        alignment: S is a multiple of this many elements.
        keep_order: the items lie in the order given; otherwise the search chooses it.
    """
    kinds = Counter(items)
    bound = shard_lower_bound(kinds, world_size, alignment)
    suggested = _suggested(kinds, bound, alignment)
    if keep_order:
        pack = exact = _fixed_order(items, world_size)
        work = len(items)
    else:
        pack = _greedy(kinds, world_size)
        exact = _exact(kinds, world_size)
        work = math.prod(count + 1 for count in kinds.values()) * len(kinds)
    tries = max(32, HEURISTIC_BUDGET // len(items))
    last = ceil_to(sum(item.numel for item in items), alignment)
    shard, order = _descend(pack, suggested, alignment, tries, last)
    if shard > bound:
        tries = EXACT_BUDGET // work
        smaller = list(islice(admissible_shards(kinds, bound, alignment), tries + 1))
        exhaustive = smaller[-1] >= shard
        rivals = [rival for rival in (smaller if exhaustive else suggested[:tries]) if rival < shard]
        better = next(((rival, found) for rival in rivals if (found := exact(rival)) is not None), None)
        shard, order = better or (shard, order)
        bound = shard if exhaustive else bound
    placed, starts = place_aligned(order, shard, world_size * shard, alignment, keep_order=keep_order)
    return Found(tuple(placed), tuple(starts), shard, bound)


def _fixed_order(items: Sequence[Item], world_size: int) -> Packer:
    return lambda shard: items if place_in_order(items, shard, world_size * shard) is not None else None


def _greedy(kinds: Items, world_size: int) -> Packer:
    preferences = [
        sorted(kinds, key=lambda item: (item.block, item.numel), reverse=True),
        sorted(kinds, key=lambda item: (item.numel, item.block), reverse=True),
    ]
    plain = [[item for item in preference for _ in range(kinds[item])] for preference in preferences]

    def pack(shard: int) -> Sequence[Item] | None:
        if any(earliest_start(0, item, shard) is None for item in kinds):
            return None
        limit = world_size * shard
        orders = (greedy_order(kinds, preference, shard, limit) for preference in preferences)
        order = next((order for order in orders if order is not None), None)
        if order is None:
            order = next((o for o in plain if place_in_order(o, shard, limit) is not None), None)
        return order

    return pack


def _exact(kinds: Items, world_size: int) -> Packer:
    return lambda shard: exact_order(kinds, shard, world_size * shard)


def _suggested(kinds: Items, bound: int, alignment: int) -> list[int]:
    """Admissible shard sizes at which many boundaries can agree with many blocks, ascending."""
    steps = {alignment}
    for block in sorted({item.block for item in kinds} | set(divisors(kinds)), reverse=True)[:10]:
        steps |= {multiple for step in steps if (multiple := math.lcm(step, block)) <= 2 * bound}
    found = set(admissible_shards(kinds, bound, alignment, within=1))
    for step in steps:
        found.update(islice(admissible_shards(kinds, bound, step, within=1), 2))
    return sorted(found)


def _descend(
    pack: Packer, suggested: Sequence[int], alignment: int, tries: int, last: int
) -> tuple[int, Sequence[Item]]:
    """The first suggested shard size that ``pack`` can fill, then bisected towards the one before it.

    Bisection stops at a ten-thousandth of S: less is not worth the time.

    Args:
        tries: calls of ``pack`` allowed, one for ``last`` apart.
        last: a shard size that holds everything on one rank.
    """
    low, high, order = suggested[0], last, None
    for shard in suggested[:tries]:
        tries -= 1
        order = pack(shard)
        if order is not None:
            high = shard
            break
        low = shard
    if order is None:
        order = pack(last)
        assert order is not None
    while tries > 0 and high - low > max(alignment, high // 10_000):
        tries -= 1
        middle = ceil_to((low + high) // 2, alignment)
        found = pack(middle) if middle < high else None
        if found is None:
            low = middle
        else:
            high, order = middle, found
    return high, order
