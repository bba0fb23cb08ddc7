"""In which steps Shampoo's blocks get new inverse roots: about as much work in each step, on each rank."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .shampoo_blocks import Block, BlockGrid


@dataclass(frozen=True)
class Turns:
    """The turns of one matrix's blocks among those of all matrices.

    Attributes:
        grid: its blocks.
        before: by the cost of a block, how many blocks of all matrices have their turn before the first of these.
    """

    grid: BlockGrid
    before: dict[int, int]

    def first_due(self, block: Block, frequency: int) -> int:
        """The step, from 1 to ``frequency``, in which a block gets its first roots.

        Each round of ``frequency`` turns begins one step later than the last. A rank that holds the same matrices of
        every layer has turns at equal distances, and would have all of them in the same few steps.
        """
        turn = self.before[_cost(block)] + _ordinals(self.grid)[block.index]
        return 1 + (turn + turn // frequency) % frequency


def turns_of(grids: Sequence[BlockGrid]) -> list[Turns]:
    """The costliest blocks of all come first, equally costly ones in order.

    No rank's share has a part in it: weights are equal bit for bit on any number of ranks.
    """
    totals = sum((_costs(grid) for grid in grids), Counter[int]())
    before, turn = {}, 0
    for cost in sorted(totals, reverse=True):
        before[cost], turn = turn, turn + totals[cost]
    turns = []
    for grid in grids:
        turns.append(Turns(grid, dict(before)))
        for cost, count in _costs(grid).items():
            before[cost] += count
    return turns


def _cost(block: Block) -> int:
    """What its two eigendecompositions take, in proportion."""
    return block.rows**3 + block.columns**3


@functools.lru_cache(maxsize=1024)
def _costs(grid: BlockGrid) -> Counter[int]:
    """How many blocks cost how much."""
    return Counter(map(_cost, grid.all_blocks()))


@functools.lru_cache(maxsize=1024)
def _ordinals(grid: BlockGrid) -> list[int]:
    """How many blocks that cost as much come before each."""
    seen: Counter[int] = Counter()
    ordinals = []
    for cost in map(_cost, grid.all_blocks()):
        ordinals.append(seen[cost])
        seen[cost] += 1
    return ordinals
