"""How a parameter is divided into the blocks that share a scale, where it may be cut, and which run it is in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..planner import Elements, Granularity, Rows
from ..quantize import check_size

_LEAST_NUMEL = 4096
"""Smaller tensors have no blocks. It is the whole tensor that counts, never a shard of it."""


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of one tensor, read as lines of ``cols`` elements, in bands of ``h`` lines cut into ``w`` columns.

    ::

        tile=(2, 3) on [5, 8]       block=4 on [10] is h = 1, w = cols = 4
        | 0 0 0 1 1 1 2 2 |         | 0 0 0 0 |
        | 0 0 0 1 1 1 2 2 |         | 1 1 1 1 |
        | 3 3 3 4 4 4 5 5 |         | 2 2
        | 3 3 3 4 4 4 5 5 |
        | 6 6 6 7 7 7 8 8 |

    The last band may have fewer lines, the last column fewer elements, and the last line of 1-D blocks too. Blocks
    are numbered band by band; a band is what may not be cut.
    """

    numel: int
    cols: int
    h: int
    w: int

    @property
    def band(self) -> int:
        """Elements of a band: shards are cut at its multiples."""
        return self.h * self.cols

    @property
    def band_blocks(self) -> int:
        return -(-self.cols // self.w)

    @property
    def count(self) -> int:
        """Blocks of the whole tensor."""
        return self.blocks_before(self.numel)

    def blocks_before(self, element: int) -> int:
        """Blocks that begin before an element where a band begins or the tensor ends."""
        return -(-element // self.band) * self.band_blocks

    def cuts(self, element: int) -> bool:
        """Whether a shard that ends before ``element`` would cut a block."""
        return element % self.band != 0 and element != self.numel


@dataclass(frozen=True)
class Rectangle:
    """Blocks of one size, in rows and columns: ``rows`` * ``columns`` blocks of h * w elements.

    Attributes:
        start, scale_start: the first element and the first block, in elements and blocks of the tensor's shard.
        line, band_blocks: elements from one line to the next, and blocks from one row of blocks to the next.
        whole: whether the blocks have the full size of the grid's.
    """

    start: int
    scale_start: int
    rows: int
    columns: int
    h: int
    w: int
    line: int
    band_blocks: int
    whole: bool

    @property
    def size(self) -> tuple[int, int, int, int]:
        return self.rows, self.h, self.columns, self.w

    @property
    def stride(self) -> tuple[int, int, int, int]:
        return self.h * self.line, self.line, self.w, 1

    @property
    def scale_size(self) -> tuple[int, int, int, int]:
        return self.rows, 1, self.columns, 1

    @property
    def scale_stride(self) -> tuple[int, int, int, int]:
        return self.band_blocks, 1, 1, 1


@functools.lru_cache(maxsize=4096)
def rectangles(grid: BlockGrid, numel: int) -> tuple[Rectangle, ...]:
    """Bands of ``numel`` elements in all as rectangles of blocks of one size: one rectangle if all are full."""
    found = []
    lines, tail = divmod(numel, grid.cols)
    bands, rest_lines = divmod(lines, grid.h)
    columns, rest_cols = divmod(grid.cols, grid.w)
    for row, rows, h in ((0, bands, grid.h), (bands, 1, rest_lines)):
        for column, count, w in ((0, columns, grid.w), (columns, 1, rest_cols)):
            if rows and h and count and w:
                rectangle = Rectangle(
                    start=row * grid.band + column * grid.w,
                    scale_start=row * grid.band_blocks + column,
                    rows=rows,
                    columns=count,
                    h=h,
                    w=w,
                    line=grid.cols,
                    band_blocks=grid.band_blocks,
                    whole=(h, w) == (grid.h, grid.w),
                )
                found.append(rectangle)
    if tail:
        last = Rectangle(lines * grid.cols, bands * grid.band_blocks, 1, 1, 1, tail, tail, 1, whole=False)
        found.append(last)
    return tuple(found)


@dataclass(frozen=True)
class Blocks:
    """The blocks that an optimizer keeps one scale for.

    Args:
        block: consecutive elements, of tensors that have no tiles.
        tile: rows and columns of the tiles of tensors of two or more dimensions, read as lines of the last one;
            None divides them into ``block`` elements too.

    Raises:
        TypeError, ValueError: a size that is no positive integer.
    """

    block: int = 256
    tile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.tile is not None:
            if not isinstance(self.tile, Sequence) or len(self.tile) != 2:
                raise TypeError(f"tile is {self.tile!r}; give (rows, columns), or None")
            object.__setattr__(self, "tile", tuple(self.tile))
        for name, size in (("block", self.block), *(("tile", side) for side in self.tile or ())):
            check_size(name, size)

    def grid(self, shape: Sequence[int]) -> BlockGrid | None:
        """The blocks of a tensor of ``shape``; None if it is too small for any.

        Raises:
            ValueError: a tile larger than the tensor.
        """
        numel = math.prod(shape)
        if numel < _LEAST_NUMEL:
            return None
        if self.tile is None or len(shape) < 2:
            return BlockGrid(numel, cols=self.block, h=1, w=self.block)
        (h, w), cols = self.tile, shape[-1]
        if h > numel // cols or w > cols:
            raise ValueError(
                f"a tile of {h} x {w} is larger than the tensor, {numel // cols} lines of {cols} elements. Take a "
                "smaller tile, or blocks of consecutive elements (tile=None)"
            )
        return BlockGrid(numel, cols, h, w)

    def granularity(self, shape: Sequence[int]) -> Granularity | None:
        """What ``fully_shard`` must not cut in a tensor of ``shape``.

        Raises:
            ValueError: a tile larger than the tensor.
        """
        grid = self.grid(shape)
        if grid is None:
            return None
        return Elements(grid.band) if self.tile is None or len(shape) < 2 else Rows(grid.h)
