"""Which tensors of a unit share a buffer.

Blocks that do not suit one another inflate a common shard: where many boundaries cut them all, S is a
multiple of their least common multiple. Apart, each buffer needs only a multiple of its own blocks, at the
price of one more collective each way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

from vescale_compile.planner.bound import Items, shard_lower_bound, split_lower_bound
from vescale_compile.planner.layout import Item
from vescale_compile.planner.search import Found, search

LEAST_SAVING = 0.01
"""A further buffer must save this share of the unit's elements ..."""

LEAST_SAVING_BYTES = 16 * 1024
"""... and so many bytes for each rank: a step of a ring collective moves no more in the time that it takes to
start, so a smaller saving costs more in latency than it gains in bandwidth."""

MOST_CLASSES = 7
"""Block sizes that are told apart; their partitions are enumerated. The smallest ones stay together."""


def split(items: Sequence[Item], world_size: int, alignment: int, *, itemsize: int, keep_order: bool) -> list[Found]:
    """The buffers, their items and layouts, that minimize elements for each rank plus the price of buffers.

    Items with the same block share a buffer. The best partition is found over proven lower bounds first; the
    bounds of its buffers are then replaced by the shard sizes that the search reaches, until the best
    partition consists of these alone. So nothing is laid out that could not have been part of the answer.
    """
    lay_out = partial(search, world_size=world_size, alignment=alignment, keep_order=keep_order)
    kinds = Counter(items)
    share = sum(item.numel for item in items) / world_size
    price = max(LEAST_SAVING * share, LEAST_SAVING_BYTES / itemsize)
    worthwhile = split_lower_bound(kinds, world_size, alignment) + price
    if shard_lower_bound(kinds, world_size, alignment) <= worthwhile:
        together = lay_out(items)
        if together.shard <= worthwhile:  # no split can save its price
            return [together]
    blocks = _blocks_by_mask(kinds, alignment)
    cost = [0] + [
        shard_lower_bound({i: n for i, n in kinds.items() if i.block in chosen}, world_size, alignment)
        for chosen in blocks[1:]
    ]
    found: dict[int, Found] = {}
    while True:
        masks = _cheapest_partition(cost, price)
        if all(mask in found for mask in masks):
            return [found[mask] for mask in masks]
        for mask in masks:
            if mask not in found:
                found[mask] = lay_out([item for item in items if item.block in blocks[mask]])
                cost[mask] = found[mask].shard


def _blocks_by_mask(kinds: Items, alignment: int) -> list[set[int]]:
    """For each set of classes, as a bit mask, its block sizes.

    Each block size is a class of its own, the largest first, but for those that divide the alignment: they
    suit any buffer and are one class. Block sizes beyond ``MOST_CLASSES`` join that one.
    """
    sizes = sorted({item.block for item in kinds}, reverse=True)
    apart = [size for size in sizes if alignment % size][: MOST_CLASSES - 1]
    rest = set(sizes) - set(apart)
    classes = [{size} for size in apart] + ([rest] if rest else [])
    masks: list[set[int]] = [set()]
    for sizes_of_class in classes:
        masks += [chosen | sizes_of_class for chosen in masks]
    return masks


def _cheapest_partition(cost: Sequence[int], price: float) -> list[int]:
    """The masks of a partition of all classes with the least sum of cost and price; dynamic over subsets."""
    best: list[tuple[float, tuple[int, ...]]] = [(-price, ())]
    for mask in range(1, len(cost)):
        first = mask & -mask
        rest = mask ^ first
        candidate: tuple[float, tuple[int, ...]] = (math.inf, ())
        part = rest
        while True:
            total, others = best[rest ^ part]
            candidate = min(candidate, (total + cost[part | first] + price, (part | first, *others)))
            if not part:
                break
            part = (part - 1) & rest
        best.append(candidate)
    return list(best[-1][1])
