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

    def blocks_before(self, element: int) -> int | None:
        """Blocks that begin before an element of the flattened parameter, which is the first of a row of blocks, or
        behind the last; None of another, where a shard that ends there would cut a block."""
        row, column = divmod(element, self.shape[-1])
        matrix, row = divmod(row, self.shape[-2])
        return None if column or row % self.size else (matrix * self.down + row // self.size) * self.across

    def all_blocks(self) -> list[Block]:
        """In order, as a rank has them that holds the whole parameter."""
        blocks = self.held(0, math.prod(self.shape))
        assert blocks is not None
        return blocks

    def held(self, start: int, stop: int) -> list[Block] | None:
        """The blocks in the elements [start, stop) of the flattened parameter; None if a block is cut."""
        if start == stop:
            return []
        index = self.blocks_before(start)
        if index is None or self.blocks_before(stop) is None:
            return None
        columns = self.shape[-1]
        first, last = start // columns, stop // columns
        blocks: list[Block] = []
        row = first
        while row < last:
            rows = min(self.size, self.shape[-2] - row % self.shape[-2])
            for i in range(self.across):
                width = min(self.size, columns - i * self.size)
                blocks.append(Block(index + len(blocks), row - first, rows, i * self.size, width))
            row += rows
        return blocks


def own_blocks(param: Tensor, grid: BlockGrid) -> list[Block]:
    """The blocks that this rank holds of a parameter that :func:`check_cuts` found to be cut between blocks."""
    blocks = grid.held(*(param.interval if isinstance(param, RaggedDTensor) else (0, param.numel())))
    assert blocks is not None
    return blocks


def check_cuts(param: Tensor, grid: BlockGrid, name: str | None = None) -> None:
    """ValueError if a rank's shard of a parameter begins or ends inside a block, naming the rank and the parameter."""
    if not isinstance(param, RaggedDTensor):
        return
    for rank, (start, stop) in param.placement.held(param.shape).items():
        if grid.blocks_before(start) is None or grid.blocks_before(stop) is None:
            raise ValueError(
                f"{rank_prefix(param)}Shampoo: {describe(param, name)} is cut inside a block of {grid.size} rows: rank "
                f"{rank} of its mesh holds elements {(start, stop)}. Shard it with "
                f"fully_shard(granularity=Shampoo.granularity_for(block={grid.size}))"
            )
