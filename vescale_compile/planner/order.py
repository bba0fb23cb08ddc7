"""Orders of items in a buffer, for one shard size: exact for few items, greedy for many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from vescale_compile.planner.bound import Items
from vescale_compile.planner.layout import Item, earliest_start


def exact_order(kinds: Items, shard: int, limit: int) -> list[Item] | None:
    """An order that fits ``limit`` elements, or ``None`` if there is none.

    Dynamic program over the multisets of placed items. For each it keeps the earliest end of any order: since
    ``earliest_start`` is monotone, whatever follows does best after the earliest end. Multisets that waste
    more than the limit spares are not continued. The cost is at most the number of multisets (the product of
    count + 1) times the number of kinds.
    """
    items = list(kinds)
    spare = limit - sum(item.numel * count for item, count in kinds.items())
    weights, states = [], 1
    for item in items:
        weights.append(states)
        states *= kinds[item] + 1
    ends: list[int | None] = [None] * states
    volumes, last = [0] * states, [-1] * states
    ends[0] = 0
    for state in range(states):
        position = ends[state]
        if position is None:
            continue
        for index, item in enumerate(items):
            if state // weights[index] % (kinds[item] + 1) == kinds[item]:
                continue
            start = earliest_start(position, item, shard)
            if start is None:
                return None
            if start - volumes[state] > spare:
                continue
            target, end = state + weights[index], start + item.numel
            known = ends[target]
            if known is None or end < known:
                ends[target], last[target] = end, index
                volumes[target] = volumes[state] + item.numel
    if ends[-1] is None:
        return None
    order, state = [], states - 1
    while state:
        order.append(items[last[state]])
        state -= weights[last[state]]
    return order[::-1]


def greedy_order(kinds: Items, preference: Sequence[Item], shard: int, limit: int) -> list[Item] | None:
    """An order that fits ``limit`` elements, if this rule finds one.

    At each position comes the first kind, in order of preference, that needs no padding before it. If all
    need some, the one that needs least comes, after the largest items that fit in its gap.

    Args:
        preference: the kinds of items, most preferred first; each has a valid place in such shards.
    """
    # Whose first is found at once, whatever was deleted before it.
    left = OrderedDict((item, kinds[item]) for item in preference if kinds[item])
    largest_first = sorted(left, reverse=True)
    order: list[Item] = []
    spare = limit - sum(item.numel * count for item, count in kinds.items())
    position = volume = 0

    def place(item: Item, start: int) -> None:
        nonlocal position, volume
        position = start + item.numel
        volume += item.numel
        order.append(item)
        left[item] -= 1
        if not left[item]:
            del left[item]

    while left:
        best, best_start = next(iter(left)), limit + 1
        for item in left:
            start = earliest_start(position, item, shard)
            assert start is not None
            if start < best_start:
                best, best_start = item, start
                if start == position:
                    break
        for item in largest_first if best_start > position else ():
            while left.get(item, 0) > (item == best) and position + item.numel <= best_start:
                place(item, position)
        if best_start - volume > spare:
            return None
        place(best, best_start)
    return order
