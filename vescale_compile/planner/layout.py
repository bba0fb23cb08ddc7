"""Where tensors lie in a buffer: valid starts, and the exact placement for a given order and shard size.

A buffer of ``world_size`` shards of S elements is one index range; rank k holds [k * S, (k + 1) * S). A
tensor that starts at l is cut at each shard boundary k * S strictly inside it, and no block is cut if and
only if each such k * S - l is a multiple of the tensor's block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple


class Item(NamedTuple):
    """A tensor as placement sees it: ``numel`` elements in blocks of ``block`` (the last may be shorter)."""

    numel: int
    block: int


def ceil_to(value: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


def earliest_start(position: int, item: Item, shard: int) -> int | None:
    """The first valid start of ``item`` at or after ``position``, in elements.

    The valid starts are one fixed set for an item and a shard size, so a later position never yields an
    earlier start.

    Returns:
        The start, or ``None`` if the item has no valid start at all in shards of ``shard`` elements.
    """
    numel, block = item
    room = shard - position % shard
    if numel <= room:
        return position
    # The item reaches the next boundary from anywhere before it, so it must lie whole blocks ahead of it.
    gap = room % block
    if shard % block == 0 or numel <= room - gap + shard:
        return position + gap
    # From here on the item would reach a second boundary, which agrees with no start that suits the first.
    boundary = position + room
    if numel <= shard:
        return boundary
    gap = shard % block
    return boundary + gap if numel <= 2 * shard - gap else None


def aligned_start(position: int, item: Item, shard: int, alignment: int) -> int | None:
    """The first valid start at or after ``position`` that is a multiple of ``alignment``, as ``shard`` is.

    If there is none, that of :func:`earliest_start`.
    """
    # Before a boundary, which is aligned, an item lies at a multiple of its blocks.
    in_both = Item(item.numel, math.lcm(item.block, alignment))
    start = earliest_start(ceil_to(position, alignment), in_both, shard)
    return earliest_start(position, item, shard) if start is None else start


def place_in_order(
    items: Iterable[Item], shard: int, limit: int, start_of: Callable[[int, Item, int], int | None] = earliest_start
) -> list[int] | None:
    """Start of each item, in the order given, each as early as it can be; ``None`` if ``limit`` is exceeded.

    For one order and one shard size this is exact: since ``earliest_start`` is monotone in the position, by
    induction no placement in that order ends any item earlier, so if this one does not fit, none does.
    """
    position = 0
    starts = []
    for item in items:
        start = start_of(position, item, shard)
        if start is None:
            return None
        position = start + item.numel
        if position > limit:
            return None
        starts.append(start)
    return starts


def place_aligned(
    items: Sequence[Item], shard: int, limit: int, alignment: int, *, keep_order: bool
) -> tuple[Sequence[Item], Sequence[int]]:
    """Items that fit in the order given, and their starts, the most elements at multiples of ``alignment``.

    Libraries are slower on a matrix that begins elsewhere, and some refuse it. Padding that there is anyway is used for
    it, and sizes that are no multiples come last, unless ``keep_order``; the shards do not grow.
    """

    def misplaced(placed: tuple[Sequence[Item], Sequence[int]]) -> int:
        return sum(item.numel for item, start in zip(*placed, strict=True) if start % alignment)

    orders = [items] if keep_order else [items, sorted(items, key=lambda item: item.numel % alignment != 0)]
    found: list[tuple[Sequence[Item], Sequence[int]]] = []
    for order in orders:
        for start_of in (earliest_start, partial(aligned_start, alignment=alignment)):
            starts = place_in_order(order, shard, limit, start_of)
            found += [] if starts is None else [(order, starts)]
    return min(found, key=misplaced)


@dataclass(frozen=True, slots=True)
class Layout:
    """Items at their starts in a buffer, in ascending order of start. It checks itself when made.

    Args:
        items: what lies in the buffer, in the order in which it lies there.
        starts: first element of each item.
        world_size: number of ranks.
        shard_numel: S, elements of each rank.
        alignment: S is a multiple of this many elements.

    Raises:
        ValueError: a start is missing, items overlap or leave the buffer, a block is cut, S is not aligned.
    """

    items: tuple[Item, ...]
    starts: tuple[int, ...]
    world_size: int
    shard_numel: int
    alignment: int

    def __post_init__(self) -> None:
        shard = self.shard_numel
        if len(self.items) != len(self.starts):
            raise ValueError(f"{len(self.items)} items but {len(self.starts)} starts")
        if shard < 1 or shard % self.alignment:
            raise ValueError(f"a shard of {shard} elements is no positive multiple of {self.alignment}")
        intervals = [(start, start + item.numel) for item, start in zip(self.items, self.starts, strict=True)]
        for (_, end), (start, _) in pairwise([(0, 0), *intervals]):
            if start < end:
                raise ValueError(f"an item starts at {start}, before the end of its predecessor at {end}")
        if intervals and intervals[-1][1] > self.world_size * shard:
            raise ValueError(f"the last item ends at {intervals[-1][1]}, past {self.world_size} x {shard}")
        for item, (start, end) in zip(self.items, intervals, strict=True):
            first = (start // shard + 1) * shard
            second = first + shard
            if (first < end and (first - start) % item.block) or (second < end and shard % item.block):
                raise ValueError(
                    f"a block of {item.block} elements of the item in [{start}, {end}) is cut by a boundary "
                    f"between shards of {shard} elements"
                )
