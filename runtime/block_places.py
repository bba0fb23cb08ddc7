"""Where the blocks of a packing lie, for kernels: as rectangles of alike blocks, or in one table for all.

A rectangle is a view of memory: a kernel that takes one reads and writes at full speed on any device, and a unit has a
few on each rank. A table of strips, rows of blocks side by side in one tensor, lets one kernel work on everything that
all ranks hold, however many they are; it looks up where each element lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .packing import Packing, Piece

_STRIP_NUMEL = 2048  # elements that a strip should have at least


class Rectangle(NamedTuple):
    """Blocks of one size: ``rows`` * ``columns`` blocks of h * w elements.

    Attributes:
        element, code, scale: where the first block begins, in elements, and in bytes of the packed buffer.
        line, band, across: elements from one line, row of blocks and column of blocks to the next.
        scale_band: bytes from the scales of one row of blocks to the next.
        whole: whether the blocks have the quantizer's full size.
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
    whole: bool

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
    table: [6, N] int64, of each strip: first element, elements from one line to the next, lines, columns, place of
        the first element's code, and of the first block's scale, counted in scales.
    blocks: of a full strip.
    """

    table: Tensor
    blocks: int


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
    pieces = [piece for piece in packing.pieces(rank) if piece.tiles]
    widest = max((_width(piece) for piece in pieces), default=1)
    blocks = min(max(1, _STRIP_NUMEL // (h * w)), -(-widest // w))
    tables = [_strips(piece, blocks, packing.quantizer.scale_bytes) for piece in pieces]
    return Strips(torch.cat([torch.empty(6, 0, dtype=torch.int64), *tables], 1).to(device), blocks)


def others_of(packing: Packing, rank: int | None, device: torch.device) -> Others:
    """For :meth:`Packing.table`."""
    pieces = [piece for piece in packing.pieces(rank) if piece.tiles is None]
    size = packing.dtype.itemsize
    elements = [torch.arange(piece.element, piece.element + piece.numel) for piece in pieces]
    places = [torch.arange(piece.code // size, piece.code // size + piece.numel) for piece in pieces]
    none = torch.empty(0, dtype=torch.int64)
    return Others(torch.cat([none, *elements]).to(device), torch.cat([none, *places]).to(device))


def _width(piece: Piece) -> int:
    """Of the longest row of blocks in a piece, in elements."""
    assert piece.tiles is not None
    return piece.numel if piece.tiles.consecutive else piece.tiles.cols


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
                yield Rectangle(*places, number, 1, 1, size, w, w, w, scale_bytes, whole=size == w)
        return
    blocks = -(-cols // w)  # of a row
    band = piece.bands.start
    for line, bands, height in _bands(piece):
        for column, number, width in ((0, cols // w, w), (cols // w, 1, cols % w)):
            if number and width:
                at = line * cols - piece.start + column * w
                scale = piece.scale + ((band - piece.bands.start) * blocks + column) * scale_bytes
                places = (piece.element + at, piece.code + at, scale)
                whole = (height, width) == (h, w)
                strides = (cols, h * cols, w, blocks * scale_bytes)
                yield Rectangle(*places, bands, height, number, width, *strides, whole=whole)
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


def _strips(piece: Piece, blocks: int, scale_bytes: int) -> Tensor:
    """[6, N]: as in :class:`Strips`."""
    assert piece.tiles is not None
    _, rows, cols, h, w = piece.tiles
    if piece.tiles.consecutive:
        bands, cols, start = range(1), piece.numel, 0
    else:
        bands, start = piece.bands, piece.start
    in_matrix = -(-rows // h)
    numbers = torch.arange(bands.start, bands.stop)[:, None]
    first_row = numbers % in_matrix * h
    line = numbers // in_matrix * rows + first_row
    column = torch.arange(0, cols, blocks * w)[None]
    element = line * cols - start + column
    block = (numbers - bands.start) * -(-cols // w) + column // w
    found = torch.broadcast_tensors(
        element + piece.element,
        torch.tensor(cols),
        (rows - first_row).clamp(max=h),
        (cols - column).clamp(max=blocks * w),
        element + piece.code,
        block + piece.scale // scale_bytes,
    )
    return torch.stack([each.flatten() for each in found])
