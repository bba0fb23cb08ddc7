"""The blocks that Shampoo preconditions: which of them a rank holds, and where their factors lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..planner.spec import Granularity, Rows
from ..ragged.dtensor import RaggedDTensor
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


def blocks_by_rank(param: Tensor, grid: BlockGrid, name: str | None = None) -> list[list[Block]]:
    """The blocks that each rank of a parameter's mesh holds; of one that is not sharded, this rank's alone.

    Raises:
        ValueError: a rank's shard begins or ends inside a block, naming the rank and the parameter.
    """
    whole = ((0, param.numel()),)
    intervals = param.placement.intervals(param.shape) if isinstance(param, RaggedDTensor) else whole
    held = []
    for rank, interval in enumerate(intervals):
        blocks = grid.held(*interval)
        if blocks is None:
            raise ValueError(
                f"{rank_prefix(param)}Shampoo: {describe(param, name)} is cut inside a block of {grid.size} rows: rank "
                f"{rank} of its mesh holds elements {interval}. Shard it with "
                f"fully_shard(granularity=Shampoo.granularity_for(block={grid.size}))"
            )
        held.append(blocks)
    return held
