"""The blocks that Shampoo preconditions: which of them a rank holds, and where their factors lie."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import Tensor

from ..planner.spec import Granularity, Rows
from ..ragged.dtensor import RaggedDTensor
from ..ragged.placement import RaggedShard
from .units import describe, rank_prefix


@dataclass(frozen=True, slots=True)
class Block:
    """A submatrix that this rank holds.

    Attributes:
        index: of the parameter's blocks, in row-major order of the whole parameter.
        row, rows: the first of its rows among those that this rank holds, and how many.
        column, columns: the same of columns.
    """

    index: int
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class BlockGrid:
    """A parameter [..., m, n] as a grid of blocks of at most ``size`` x ``size``, none in two of its matrices."""

    shape: tuple[int, ...]
    size: int

    @property
    def across(self) -> int:
        """Blocks beside each other."""
        return -(-self.shape[-1] // self.size)

    @property
    def down(self) -> int:
        """Blocks below each other, in one matrix."""
        return -(-self.shape[-2] // self.size)

    @property
    def count(self) -> int:
        """Blocks of the whole parameter."""
        return math.prod(self.shape[:-2]) * self.down * self.across

    @property
    def largest(self) -> tuple[int, int]:
        """Rows and columns of the largest block."""
        return min(self.size, self.shape[-2]), min(self.size, self.shape[-1])

    @property
    def granularity(self) -> Granularity:
        """Keeps blocks whole. Of a stack whose matrices have a shorter last block it keeps the matrices whole."""
        rows = self.shape[-2]
        return Rows(rows if self.size > rows or (len(self.shape) > 2 and rows % self.size) else self.size)

    def first_block(self, row: int) -> int | None:
        """The first block in row ``row`` of the parameter's rows, counted over all matrices; None inside a block."""
        matrix, row = divmod(row, self.shape[-2])
        if row % self.size:
            return None
        return (matrix * self.down + row // self.size) * self.across

    def all_blocks(self) -> list[Block]:
        """In order, as a rank has them that holds the whole parameter."""
        blocks = self.held(0, math.prod(self.shape))
        assert blocks is not None
        return blocks

    def held(self, start: int, stop: int) -> list[Block] | None:
        """The blocks in the elements [start, stop) of the flattened parameter; None if a block is cut."""
        if start == stop:
            return []
        columns = self.shape[-1]
        first, last = start // columns, stop // columns
        if start % columns or stop % columns or self.first_block(first) is None or self.first_block(last) is None:
            return None
        blocks: list[Block] = []
        row = first
        while row < last:
            rows = min(self.size, self.shape[-2] - row % self.shape[-2])
            for i in range(self.across):
                index = (self.first_block(row) or 0) + i
                width = min(self.size, columns - i * self.size)
                blocks.append(Block(index, row - first, rows, i * self.size, width))
            row += rows
        return blocks


def own_blocks(param: Tensor, grid: BlockGrid) -> list[Block]:
    """The blocks that this rank holds of a parameter that :func:`block_counts` found to be cut between blocks."""
    blocks = grid.held(*(param.interval if isinstance(param, RaggedDTensor) else (0, param.numel())))
    assert blocks is not None
    return blocks


def block_counts(param: Tensor, grid: BlockGrid, name: str | None = None) -> list[int]:
    """How many blocks each rank of a parameter's mesh holds; of one that is not sharded, this rank alone.

    Raises:
        ValueError: a rank's shard begins or ends inside a block, naming the rank and the parameter.
    """
    if not isinstance(param, RaggedDTensor):
        return [grid.count]
    counts = []
    for rank, count in enumerate(_counts(param.placement, grid)):
        if count is None:
            raise ValueError(
                f"{rank_prefix(param)}Shampoo: {describe(param, name)} is cut inside a block of {grid.size} rows: rank "
                f"{rank} of its mesh holds elements {param.placement.interval(param.shape, rank)}. Shard it with "
                f"fully_shard(granularity=Shampoo.granularity_for(block={grid.size}))"
            )
        counts.append(count)
    return counts


@functools.lru_cache(maxsize=1024)
def _counts(placement: RaggedShard, grid: BlockGrid) -> tuple[int | None, ...]:
    """Of thousands of ranks; layers are cut alike. None for a rank whose part begins or ends inside a block."""
    held = (grid.held(*interval) for interval in placement.intervals(grid.shape))
    return tuple(None if blocks is None else len(blocks) for blocks in held)
