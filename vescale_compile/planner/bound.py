"""Proven lower bounds on shard sizes, and the shard sizes that blocks allow."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from operator import neg

from vescale_compile.planner.layout import Item, ceil_to

Items = Mapping[Item, int]
"""What a buffer holds: how many items there are of each kind."""

_GRIDS = 24  # that items share
_LAYERS = 8  # of pigeonholes


def freedom_threshold(item: Item) -> int:
    """The smallest S at which ``item`` has a valid place although its block does not divide S.

    Below it the block divides S. Proof: let the item, of e elements in blocks of g, cross c boundaries.
    c = 0: e <= S. c = 1: the boundary is j blocks after the start, and each of the two parts lies in one
    shard, so max(j * g, e - j * g) <= S for some j. c >= 2: two successive boundaries lie whole blocks after
    the start, so their distance S is a multiple of g. Hence S < min over j of max(j * g, e - j * g), where
    j = 0 stands for the first case, leaves only the last.
    """
    numel, block = item
    half = numel // (2 * block)
    return min(numel, *(max(j * block, numel - j * block) for j in (half, half + 1)))


def split_lower_bound(items: Items, world_size: int, alignment: int) -> int:
    """A proven lower bound on the elements of each of m ranks, in one buffer or in any number of them.

    Proof, with e elements and blocks of g in each item, and T the sum of the buffers' shard sizes:

    1. Volume. The ranks hold all elements: m * T >= sum of e.
    2. Counting. For a divisor d let C(d) be the items where d divides g and e. An item is cut only at
       multiples of its g, so a rank's share of an item in C(d) is a multiple of d, and so is the sum of its
       shares, over all buffers. The largest such sum is at least 1 / m of the elements in C(d), so
       T >= d * ceil(sum of e over C(d) / (m * d)).
    3. Pigeonhole. Blocks are whole on a rank. Of the k * m + 1 largest blocks some rank holds k + 1, so T is
       at least the sum of the k + 1 smallest of them. With k = 0: T is at least the largest block.
    4. T is a multiple of the alignment, since each shard size is.
    """
    volume = sum(item.numel * count for item, count in items.items())
    floor = max(
        ceil_to(volume, world_size) // world_size,
        _counting_floor(items, world_size),
        _pigeonhole_floor(items, world_size),
    )
    return ceil_to(floor, alignment)


def shard_lower_bound(items: Items, world_size: int, alignment: int) -> int:
    """A proven lower bound on S, the elements of each rank, for any layout of ``items`` in one buffer.

    Proof. S is at least ``split_lower_bound``, and each item whose ``freedom_threshold`` exceeds S has a
    block that divides S. As S grows, fewer items have; between two thresholds they are the same ones, and S
    is a multiple of the least common multiple of their blocks and the alignment. The least such S bounds all.
    """
    floor = split_lower_bound(items, world_size, alignment)
    return next(admissible_shards(items, floor, alignment))


def admissible_shards(items: Items, floor: int, alignment: int, within: int | None = None) -> Iterator[int]:
    """The S >= ``floor``, ascending, that ``freedom_threshold`` and the alignment allow.

    Args:
        within: of each range between two thresholds, only the first so many; ``None`` lists all.
    """
    kinds = sorted(((freedom_threshold(item), item.block) for item in items), reverse=True)
    thresholds = [threshold for threshold, _ in kinds]
    multiples = list(accumulate((block for _, block in kinds), math.lcm, initial=alignment))
    starts = [floor, *sorted({threshold for threshold in thresholds if threshold > floor})]
    for low, high in pairwise([*starts, None]):
        assert low is not None
        step = multiples[bisect_left(thresholds, -low, key=neg)]
        shard, listed = ceil_to(max(low, 1), step), 0
        while (high is None or shard < high) and (within is None or listed < within):
            yield shard
            shard, listed = shard + step, listed + 1


def divisors(items: Items) -> list[int]:
    """The grids that items share: gcd(g, e) of each item, closed under gcd, the largest."""
    found: set[int] = set()
    for own in sorted({math.gcd(item.block, item.numel) for item in items}, reverse=True):
        found |= {own} | {math.gcd(own, other) for other in found}
        if len(found) >= 4 * _GRIDS:
            break
    return sorted(found, reverse=True)[:_GRIDS]


def _counting_floor(items: Items, world_size: int) -> int:
    floor = 0
    for d in divisors(items):
        total = sum(e * count for (e, g), count in items.items() if e % d == 0 and g % d == 0)
        floor = max(floor, ceil_to(total, world_size * d) // world_size)
    return floor


def _pigeonhole_floor(items: Items, world_size: int) -> int:
    runs: dict[int, int] = {}
    for (e, g), count in items.items():
        runs[g] = runs.get(g, 0) + count * (e // g)
        if e % g:
            runs[e % g] = runs.get(e % g, 0) + count
    sizes = sorted(runs.items(), reverse=True)
    floor = sizes[0][0]
    for k in range(1, _LAYERS):
        first, last = k * world_size - k, k * world_size
        total = position = 0
        for size, count in sizes:
            total += size * max(0, min(position + count, last + 1) - max(position, first))
            position += count
        if position <= last:
            break
        floor = max(floor, total)
    return floor
