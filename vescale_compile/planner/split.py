"""Which tensors of a unit share a buffer.

Blocks that do not suit one another inflate a common shard: where many boundaries cut them all, S is a
multiple of their least common multiple. Apart, each buffer needs only a multiple of its own blocks, at the
price of one more collective each way.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import combinations

from vescale_compile.planner.bound import Items, freedom_threshold, shard_lower_bound, split_lower_bound
from vescale_compile.planner.layout import Item
from vescale_compile.planner.search import Found, search

LEAST_SAVING = 0.01
"""A further buffer must save this share of the unit's elements ..."""

LEAST_SAVING_BYTES = 16 * 1024
"""... and so many bytes for each rank: a step of a ring collective moves no more in the time that it takes to
start, so a smaller saving costs more in latency than it gains in bandwidth."""

MOST_SIZES = 64
"""Classes of block sizes at most; a bound is computed for each pair of them, in a second for so many."""

MOST_CLASSES = 7
"""Classes whose partitions are all enumerated. Of more, pairs are joined until so many are left."""


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
    classes = _classes(kinds, alignment)
    found: dict[int, Found] = {}

    def held(mask: int) -> Items:
        return {item: n for index, each in enumerate(classes) if mask >> index & 1 for item, n in each.items()}

    @cache
    def bound(mask: int) -> int:
        return shard_lower_bound(held(mask), world_size, alignment)

    def cost(mask: int) -> int:
        return found[mask].shard if mask in found else bound(mask)

    while True:
        masks = _cheap_partition([1 << index for index in range(len(classes))], cost, price)
        if all(mask in found for mask in masks):
            return [found[mask] for mask in masks]
        for mask in masks:
            if mask not in found:
                chosen = held(mask)
                found[mask] = lay_out([item for item in items if item in chosen])


def _classes(kinds: Items, alignment: int) -> list[Items]:
    """The kinds of each class; a set of classes is a bit mask.

    Each block size is a class of its own, the largest first, but for those that divide the alignment: they
    suit any buffer and are one class. Of more than ``MOST_SIZES``, those join that one whose items are the first to
    fit as shards grow, whether or not their blocks divide them.
    """
    freedom: dict[int, int] = {}
    for item in kinds:
        if alignment % item.block:
            freedom[item.block] = max(freedom.get(item.block, 0), freedom_threshold(item))
    apart = heapq.nlargest(MOST_SIZES - 1, freedom, key=lambda block: (freedom[block], block))
    classes: dict[int, dict[Item, int]] = {block: {} for block in sorted(apart, reverse=True)}
    rest: dict[Item, int] = {}
    for item, count in kinds.items():
        classes.get(item.block, rest)[item] = count
    return [each for each in (*classes.values(), rest) if each]


Cost = Callable[[int], int]
"""Elements for each rank in a buffer of the classes in a mask, as far as they are known."""


def _cheap_partition(classes: Sequence[int], cost: Cost, price: float) -> list[int]:
    """Masks of a partition of all classes with little cost and price, the least of up to ``MOST_CLASSES``.

    Of more, the two whose common buffer costs least beyond their own are joined until so many are left. That
    may cost something, where blocks suit one another only by threes, so each partition on the way is a rival.
    """
    rivals = [list(classes)]
    while len(rivals[-1]) > MOST_CLASSES:
        rivals.append(_with_a_pair_joined(rivals[-1], cost))
    rivals.append(_cheapest_partition(rivals[-1], cost, price))
    return min(reversed(rivals), key=lambda masks: sum(map(cost, masks)) + price * len(masks))


def _with_a_pair_joined(masks: Sequence[int], cost: Cost) -> list[int]:
    first, second = min(
        combinations(masks, 2), key=lambda pair: cost(pair[0] | pair[1]) - cost(pair[0]) - cost(pair[1])
    )
    return [mask | second if mask == first else mask for mask in masks if mask != second]


def _cheapest_partition(classes: Sequence[int], cost: Cost, price: float) -> list[int]:
    """The masks of a partition of all classes with the least sum of cost and price; dynamic over subsets."""
    unions = [0]
    for each in classes:
        unions += [union | each for union in unions]
    costs = [0, *map(cost, unions[1:])]
    best: list[tuple[float, tuple[int, ...]]] = [(-price, ())]
    for mask in range(1, len(costs)):
        first = mask & -mask
        rest = mask ^ first
        candidate: tuple[float, tuple[int, ...]] = (math.inf, ())
        part = rest
        while True:
            total, others = best[rest ^ part]
            candidate = min(candidate, (total + costs[part | first] + price, (part | first, *others)))
            if not part:
                break
            part = (part - 1) & rest
        best.append(candidate)
    return [unions[mask] for mask in best[-1][1]]
