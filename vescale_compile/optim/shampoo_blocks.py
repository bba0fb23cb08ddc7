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
    """The blocks that this rank holds of a parameter that :func:`check_cuts` found to be cut between blocks."""
    blocks = grid.held(*(param.interval if isinstance(param, RaggedDTensor) else (0, param.numel())))
    assert blocks is not None
    return blocks


def check_cuts(param: Tensor, grid: BlockGrid, name: str | None = None) -> None:
    """ValueError if a rank's shard of a parameter begins or ends inside a block, naming the rank and the parameter."""
    if not isinstance(param, RaggedDTensor):
        return
    for rank, count in _counts(param.placement, grid).items():
        if count is None:
            raise ValueError(
                f"{rank_prefix(param)}Shampoo: {describe(param, name)} is cut inside a block of {grid.size} rows: rank "
                f"{rank} of its mesh holds elements {param.placement.interval(param.shape, rank)}. Shard it with "
                f"fully_shard(granularity=Shampoo.granularity_for(block={grid.size}))"
            )


@functools.lru_cache(maxsize=1024)
def placement_of_blocks(placement: RaggedShard, grid: BlockGrid) -> RaggedShard:
    """Where tensors of one row for each block lie, of a parameter that :func:`check_cuts` found to be cut between
    blocks. Of thousands of ranks; layers are cut alike."""
    counts = _counts(placement, grid)
    return RaggedShard((0,), [counts.get(rank) or 0 for rank in range(len(placement.local_units))])


def _counts(placement: RaggedShard, grid: BlockGrid) -> dict[int, int | None]:
    """How many blocks each rank holds that holds some; None for one whose part begins or ends inside a block."""
    held = {rank: grid.held(*interval) for rank, interval in placement.held(grid.shape).items()}
    return {rank: None if blocks is None else len(blocks) for rank, blocks in held.items()}
