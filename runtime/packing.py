"""What travels of a quantized unit, and where in it: codes, their scales, and what is not quantized.

A packed buffer has one part of P bytes for each rank, the same P on every rank. In it, by the unit's plan alone::

    codes      S bytes: that of each element of the rank's shard, at the element's place
    scales     of the rank's blocks, in the order of its elements; as many places as the fullest rank has blocks
    elements   of the rank's parameters that are not quantized, in the dtype that they are wanted in

So one collective brings everything, and a shard is quantized without a word from any other, because no block is cut.
Kernels are told where blocks lie by tables: a strip is a row of blocks side by side, all of one tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes
_STRIP_NUMEL = 2048  # elements that one entry of the tables should describe at least


class Tiles(NamedTuple):
    """The blocks of a tensor: tiles of h x w elements in each of its matrices; those at the edges may be smaller.

    Blocks of consecutive elements are tiles of h = 1 in one row. Shards are cut between rows of tiles, or, in a tensor
    of one row, between tiles.
    """

    matrices: int
    rows: int
    cols: int
    h: int
    w: int

    @property
    def consecutive(self) -> bool:
        return self.matrices == self.rows == 1


class Quantizer(Protocol):
    """Blocks of float32 to codes of one byte and back; what it does to tensors can be compiled."""

    def __hash__(self) -> int: ...

    @property
    def tile(self) -> tuple[int, int]:
        """h and w of its tiles."""

    @property
    def scale_bytes(self) -> int:
        """Of a stored scale: 1 to 4."""

    def tiles(self, shape: Sequence[int]) -> Tiles | None:
        """The blocks of a tensor of ``shape``; None if it is not quantized."""

    def scale_of(self, largest: Tensor) -> Tensor:
        """The stored scale of blocks whose absolute maxima are ``largest``, float32: int32, of the same shape."""

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        """Codes of float32 values, in the low bytes of int32."""

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The float32 values that codes, in int32, stand for."""


class StochasticQuantizer(Quantizer, Protocol):
    """One that can round at random, so that the mean of what codes stand for is the value."""

    @property
    def seed(self) -> int | None:
        """Of the random numbers."""

    def encode_stochastically(self, values: Tensor, scales: Tensor, uniform: Tensor) -> Tensor:
        """As ``encode``, rounded up where the fraction exceeds ``uniform``, which is in [0, 1)."""


class Tables(NamedTuple):
    """Where a kernel finds what it works on.

    Attributes:
        strips: [6, N] int64, of each strip: first element, elements from one line to the next, lines, columns, place
            of the first element's code and of the first block's scale, in bytes.
        elements: [M] int64: those that are not quantized.
        places: [M] int64: theirs in the packed buffer, counted in elements of their dtype.
    """

    strips: Tensor
    elements: Tensor
    places: Tensor


class _Piece(NamedTuple):
    """What a rank holds of a parameter: elements [start, stop) of it, from ``offset`` of the buffer on."""

    rank: int
    offset: int
    start: int
    stop: int
    tiles: Tiles | None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def bands(self) -> range:
        """Rows of tiles, counted in the parameter."""
        assert self.tiles is not None
        return range(_band_at(self.tiles, self.start), _band_at(self.tiles, self.stop))

    @property
    def blocks(self) -> int:
        if self.tiles is None:
            return 0
        if self.tiles.consecutive:
            return -(-self.numel // self.tiles.w)
        return len(self.bands) * -(-self.tiles.cols // self.tiles.w)


def _band_at(tiles: Tiles, element: int) -> int:
    matrix, row = divmod(element // tiles.cols, tiles.rows)
    return matrix * -(-tiles.rows // tiles.h) + -(-row // tiles.h)


class Packing:
    """The packed form of a unit's buffer of ``world_size * shard_numel`` elements.

    Args:
        key: names it in graphs; equal on all ranks.
        quantizer: of the parameters that it has tiles for.
        world_size: ranks that the buffer is sharded over.
        shard_numel: S, a multiple of 16.
        params: first element and shape of each parameter, in the order in which they lie in the buffer.
        dtype: in which the elements of the others travel.

    Attributes:
        part: P, bytes of a rank's part.
        across: blocks of a full strip.
    """

    def __init__(
        self,
        key: str,
        quantizer: Quantizer,
        world_size: int,
        shard_numel: int,
        params: Sequence[tuple[int, tuple[int, ...]]],
        dtype: torch.dtype,
    ) -> None:
        if shard_numel % _ALIGNMENT:
            raise AssertionError(f"shards of {shard_numel} elements: their codes would not be aligned")
        self.key, self.quantizer, self.world_size, self.shard_numel = key, quantizer, world_size, shard_numel
        self.dtype = dtype
        h, w = quantizer.tile
        self.pieces = sorted(_pieces(params, quantizer, shard_numel), key=lambda piece: (piece.rank, piece.offset))
        widest = max((_width(piece) for piece in self.pieces if piece.tiles), default=1)
        self.across = min(max(1, _STRIP_NUMEL // (h * w)), -(-widest // w))
        blocks, others = [0] * world_size, [0] * world_size
        for piece in self.pieces:
            blocks[piece.rank] += piece.blocks
            others[piece.rank] += piece.numel if piece.tiles is None else 0
        self._scales_at = shard_numel
        self._others_at = _aligned(shard_numel + max(blocks) * quantizer.scale_bytes)
        self.part = _aligned(self._others_at + max(others) * dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Of the packed buffer."""
        return self.world_size * self.part

    @functools.cache  # noqa: B019  (as long as the packing itself)
    def tables(self, device: torch.device) -> Tables:
        """For kernels that take the whole buffer of elements, and the whole packed buffer."""
        return Tables(*(table.to(device) for table in self._tables))

    @functools.cache  # noqa: B019
    def shard_tables(self, rank: int, device: torch.device) -> Tables:
        """For kernels that take a rank's shard, and its part of the packed buffer."""
        strips, elements, places = self._tables
        mine = (rank * self.shard_numel <= strips[0]) & (strips[0] < (rank + 1) * self.shard_numel)
        others = (rank * self.shard_numel <= elements) & (elements < (rank + 1) * self.shard_numel)
        strips = strips[:, mine].clone()
        strips[0] -= rank * self.shard_numel
        strips[4:] -= rank * self.part
        elements, places = elements[others] - rank * self.shard_numel, places[others]
        places -= rank * self.part // self.dtype.itemsize
        return Tables(strips.to(device), elements.to(device), places.to(device))

    @functools.cached_property
    def _tables(self) -> Tables:
        strips, elements, places = [], [], []
        blocks, others = [0] * self.world_size, [0] * self.world_size
        for piece in self.pieces:
            begin = piece.offset + piece.start
            part = piece.rank * self.part
            if piece.tiles is None:
                elements.append(torch.arange(begin, begin + piece.numel))
                first = (part + self._others_at) // self.dtype.itemsize + others[piece.rank]
                places.append(torch.arange(first, first + piece.numel))
                others[piece.rank] += piece.numel
                continue
            first_element, line, rows, columns, block = _strips(piece, self.across)
            codes = first_element + (part + begin - piece.rank * self.shard_numel)
            scales = (block + blocks[piece.rank]) * self.quantizer.scale_bytes + part + self._scales_at
            strips.append(torch.stack([first_element + begin, line, rows, columns, codes, scales]))
            blocks[piece.rank] += piece.blocks
        none = torch.empty(0, dtype=torch.int64)
        return Tables(torch.cat(strips, 1), torch.cat([none, *elements]), torch.cat([none, *places]))


_packings: WeakValueDictionary[str, Packing] = WeakValueDictionary()


def packing_named(key: str) -> Packing:
    """The packing that a graph names; a unit that holds it is alive while the graph runs."""
    return _packings[key]


def packing_for(
    key: str,
    quantizer: Quantizer,
    world_size: int,
    shard_numel: int,
    params: Sequence[tuple[int, tuple[int, ...]]],
    dtype: torch.dtype,
) -> Packing | None:
    """The packing of a buffer, which all units that are laid out alike share; None if nothing in it is quantized."""
    if all(quantizer.tiles(shape) is None for _, shape in params):
        return None
    known = _packings.get(key)
    if known is None:
        known = _packings[key] = Packing(key, quantizer, world_size, shard_numel, params, dtype)
    return known


def _pieces(params: Sequence[tuple[int, tuple[int, ...]]], quantizer: Quantizer, shard_numel: int) -> Iterator[_Piece]:
    for offset, shape in params:
        numel, tiles = math.prod(shape), quantizer.tiles(shape)
        for rank in range(offset // shard_numel, (offset + numel - 1) // shard_numel + 1):
            start, stop = rank * shard_numel - offset, (rank + 1) * shard_numel - offset
            yield _Piece(rank, offset, max(start, 0), min(stop, numel), tiles)


def _width(piece: _Piece) -> int:
    """Of the longest row of blocks in a piece, in elements."""
    assert piece.tiles is not None
    return piece.numel if piece.tiles.consecutive else piece.tiles.cols


def _strips(piece: _Piece, across: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The first element of each strip, elements from line to line, lines, columns and the first block, each [N] int64;
    elements and blocks counted in the piece."""
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
    column = torch.arange(0, cols, across * w)[None]
    found = torch.broadcast_tensors(
        line * cols - start + column,
        torch.tensor(cols),
        (rows - first_row).clamp(max=h),
        (cols - column).clamp(max=across * w),
        (numbers - bands.start) * -(-cols // w) + column // w,
    )
    first_element, distance, lines, columns, block = (each.flatten() for each in found)
    return first_element, distance, lines, columns, block


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
