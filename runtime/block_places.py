"""Where the blocks of a packing lie, for kernels: as rectangles of alike blocks, or in one table for all.

A rectangle is a view of memory, and a unit has a few on each rank. A table of strips, rows of blocks side by side in
one tensor, lets one kernel work on everything that all ranks hold, however many they are. It looks up where a strip
lies, and from there where each element does, or, of blocks of full width, each line: what is next to one another in a
line is then known to be so, and CPUs read and write it in vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .packing import Packing, Piece

_STRIP_NUMEL = 2048  # elements that a strip should have at least; those of full width, in a line at most


class Rectangle(NamedTuple):
    """Blocks of one size: ``rows`` * ``columns`` blocks of h * w elements.

    Attributes:
        element, code, scale: where the first block begins, in elements, and in bytes of the packed buffer.
        line, band, across: elements from one line, row of blocks and column of blocks to the next.
        scale_band: bytes from the scales of one row of blocks to the next.
    """

    element: int
    code: int
    scale: int
    rows: int
    h: int
    columns: int
    w: int
    line: int
    band: int
    across: int
    scale_band: int

    def elements(self, flat: Tensor) -> Tensor:
        """View of a buffer of elements, [rows, columns, h, w]."""
        return self._view(flat, self.element)

    def codes(self, packed: Tensor) -> Tensor:
        """View of a packed buffer, of the same shape."""
        return self._view(packed, self.code)

    def scales(self, stored: Tensor) -> Tensor:
        """View of a packed buffer in the dtype of stored scales, [rows, columns, 1, 1]."""
        stride = (self.scale_band // stored.itemsize, 1, 1, 1)
        first = stored.storage_offset() + self.scale // stored.itemsize
        return stored.as_strided((self.rows, self.columns, 1, 1), stride, first)

    def _view(self, flat: Tensor, first: int) -> Tensor:
        size, stride = (self.rows, self.columns, self.h, self.w), (self.band, self.across, self.line, 1)
        return flat.as_strided(size, stride, flat.storage_offset() + first)

    def places(self, device: torch.device) -> Tensor:
        """Of the elements in a buffer, [rows, columns, h, w] int64."""
        row, column, h, w = (torch.arange(n, device=device) for n in (self.rows, self.columns, self.h, self.w))
        first = self.element + row.view(-1, 1, 1, 1) * self.band + column.view(-1, 1, 1) * self.across
        return first + h.view(-1, 1) * self.line + w

    def as_one_row(self) -> Rectangle:
        """The same blocks in one row, if they follow one another in memory."""
        if self.h > 1 or self.band != self.columns * self.across:
            return self
        return self._replace(rows=1, columns=self.rows * self.columns)

    def chunks(self, numel: int) -> Iterator[Rectangle]:
        """The rectangle in pieces of about ``numel`` elements: whole rows of blocks."""
        step = max(1, numel // (self.h * self.columns * self.w))
        for row in range(0, self.rows, step):
            yield self._replace(
                element=self.element + row * self.band,
                code=self.code + row * self.band,
                scale=self.scale + row * self.scale_band,
                rows=min(step, self.rows - row),
            )


class Strips(NamedTuple):
    """Attributes:
    table: [7, N] int64, of each strip: first element, elements from one line to the next, lines, columns, blocks,
        place of the first element's code, and of the first block's scale, counted in scales.
    blocks: of a full strip.
    tile: h and w of a full block, or of the line of one.
    """

    table: Tensor
    blocks: int
    tile: tuple[int, int]


class Others(NamedTuple):
    """What is not quantized.

    Attributes:
        elements: [M] int64, in the buffer of elements.
        places: [M] int64, in the packed buffer, counted in elements of their dtype.
    """

    elements: Tensor
    places: Tensor


def rectangles_of(packing: Packing, rank: int | None, device: torch.device) -> list[Rectangle]:
    """For :meth:`Packing.table`."""
    scale_bytes = packing.quantizer.scale_bytes
    return [r for piece in packing.pieces(rank) if piece.tiles for r in _rectangles(piece, scale_bytes)]


def strips_of(packing: Packing, rank: int | None, device: torch.device) -> Strips:
    """For :meth:`Packing.table`."""
    h, w = packing.quantizer.tile
    return _strips(packing, packing.table(rectangles_of, rank, device), (h, w), _STRIP_NUMEL // (h * w), device)


def full_width_strips_of(packing: Packing, rank: int | None, device: torch.device) -> Strips:
    """For :meth:`Packing.table`: of the blocks of full width alone."""
    h, w = packing.quantizer.tile
    return _strips(packing, _of_full_width(packing, rank, device), (h, w), _STRIP_NUMEL // w, device)


def lines_of(packing: Packing, rank: int | None, device: torch.device) -> Strips:
    """For :meth:`Packing.table`: of the blocks of full width alone, one line of them in each strip."""
    w = packing.quantizer.tile[1]
    return _strips(packing, _of_full_width(packing, rank, device), (1, w), _STRIP_NUMEL // w, device)


def _of_full_width(packing: Packing, rank: int | None, device: torch.device) -> list[Rectangle]:
    w = packing.quantizer.tile[1]
    return [r for r in packing.table(rectangles_of, rank, device) if r.w == w]


def _strips(
    packing: Packing, rectangles: Sequence[Rectangle], tile: tuple[int, int], most: int, device: torch.device
) -> Strips:
    """Of ``tile``'s height at most, and of as many blocks, at most ``most``, as takes the least work."""
    rectangles = [r.as_one_row() for r in rectangles]
    rows = Counter[int]()
    for r in rectangles:
        rows[r.columns] += r.rows

    def work(blocks: int) -> int:
        """A strip that is not full takes as long as one that is."""
        return sum(number * -(-columns // blocks) * (blocks + 1) for columns, number in rows.items())

    blocks = min(range(1, max(1, most) + 1), key=work)
    tables = [_strips_in(r, min(r.h, tile[0]), blocks, packing.quantizer.scale_bytes) for r in rectangles]
    table = torch.cat([torch.empty(7, 0, dtype=torch.int64), *tables], 1)
    if table.shape[1] == 1:
        table = table.repeat(1, 2)  # computed twice: a kernel for any number serves from two on
    return Strips(table.to(device), blocks, tile)


def _strips_in(r: Rectangle, height: int, blocks: int, scale_bytes: int) -> Tensor:
    """[7, N]: as in :class:`Strips`, in the order of memory."""
    row = torch.arange(r.rows)[:, None, None]
    line = torch.arange(0, r.h, height)[:, None]
    block = torch.arange(0, r.columns, blocks)
    count = (r.columns - block).clamp(max=blocks)
    within = row * r.band + line * r.line + block * r.across
    scale = (r.scale + row * r.scale_band) // scale_bytes + block
    size = (torch.tensor(r.line), torch.tensor(height), count * r.w, count)
    attributes = (r.element + within, *size, r.code + within, scale)
    return torch.stack([each.flatten() for each in torch.broadcast_tensors(*attributes)])


def others_of(packing: Packing, rank: int | None, device: torch.device) -> Others:
    """For :meth:`Packing.table`."""
    pieces = [piece for piece in packing.pieces(rank) if piece.tiles is None]
    size = packing.dtype.itemsize
    elements = [torch.arange(piece.element, piece.element + piece.numel) for piece in pieces]
    places = [torch.arange(piece.code // size, piece.code // size + piece.numel) for piece in pieces]
    none = torch.empty(0, dtype=torch.int64)
    return Others(torch.cat([none, *elements]).to(device), torch.cat([none, *places]).to(device))


def _rectangles(piece: Piece, scale_bytes: int) -> Iterator[Rectangle]:
    assert piece.tiles is not None
    _, _, cols, h, w = piece.tiles
    if piece.tiles.consecutive:  # as many rows of one block
        count, rest = divmod(piece.numel, w)
        for first, number, size in ((0, count, w), (count, 1, rest)):
            if number and size:
                at = first * w
                scale = piece.scale + first * scale_bytes
                places = (piece.element + at, piece.code + at, scale)
                yield Rectangle(*places, number, 1, 1, size, w, w, w, scale_bytes)
        return
    blocks = -(-cols // w)  # of a row
    band = piece.bands.start
    for line, bands, height in _bands(piece):
        for column, number, width in ((0, cols // w, w), (cols // w, 1, cols % w)):
            if number and width:
                at = line * cols - piece.start + column * w
                scale = piece.scale + ((band - piece.bands.start) * blocks + column) * scale_bytes
                places = (piece.element + at, piece.code + at, scale)
                strides = (cols, h * cols, w, blocks * scale_bytes)
                yield Rectangle(*places, bands, height, number, width, *strides)
        band += bands


def _bands(piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Rows of tiles of one height that follow one another: the first one's first line, how many, the height."""
    assert piece.tiles is not None
    _, rows, cols, h, _ = piece.tiles
    line, end = piece.start // cols, (piece.start + piece.numel) // cols
    while line < end:
        left = end - line if rows % h == 0 else min(end, (line // rows + 1) * rows) - line
        bands, rest = divmod(left, h)
        for number, height in ((bands, h), (1, rest)):
            if number and height:
                yield line, number, height
                line += number * height
