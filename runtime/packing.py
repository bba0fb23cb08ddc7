"""What travels of a quantized unit, and where in it: codes, their scales, and what is not quantized.

A packed buffer has one part of P bytes for each rank, the same P on every rank. In it, by the unit's plan alone::

    codes      S bytes: that of each element of the rank's shard, at the element's place
    scales     of the rank's blocks, in the order of its elements; as many places as the fullest rank has blocks
    elements   of the rank's parameters that are not quantized, in the dtype that they are wanted in

So one collective brings everything, and a shard is quantized without a word from any other, because no block is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

T = TypeVar("T")

_ALIGNMENT = 16  # bytes


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
        """Of a stored scale: 1 or 4."""

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


class Piece(NamedTuple):
    """What a rank holds of a parameter.

    Attributes:
        tiles: of the parameter; None if it is not quantized.
        start: first element, counted in the parameter, where tiles are cut.
        numel: how many.
        element: first element, counted in the buffer of elements.
        code: byte of its code in the packed buffer; if it is not quantized, of the element itself.
        scale: byte of the first block's scale.
    """

    tiles: Tiles | None
    start: int
    numel: int
    element: int
    code: int
    scale: int

    @property
    def bands(self) -> range:
        """Rows of tiles, counted in the parameter."""
        assert self.tiles is not None
        return range(_band_at(self.tiles, self.start), _band_at(self.tiles, self.start + self.numel))

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
        self._tables: dict[Hashable, Any] = {}
        held: list[list[Piece]] = [[] for _ in range(world_size)]
        for rank, piece in _pieces(params, quantizer, shard_numel):
            held[rank].append(piece)
        blocks = max(sum(piece.blocks for piece in pieces) for pieces in held)
        others = max(sum(piece.numel for piece in pieces if piece.tiles is None) for pieces in held)
        self._others_at = _aligned(shard_numel + blocks * quantizer.scale_bytes)
        self.part = _aligned(self._others_at + others * dtype.itemsize)
        self._pieces = [self._placed(pieces) for pieces in held]

    @property
    def nbytes(self) -> int:
        """Of the packed buffer."""
        return self.world_size * self.part

    def pieces(self, rank: int | None) -> list[Piece]:
        """What ``rank`` holds, counted in its shard and its part of the packed buffer; or, for None, what all ranks
        hold, counted in the whole buffers."""
        if rank is not None:
            return self._pieces[rank]
        return [
            piece._replace(
                element=piece.element + each * self.shard_numel,
                code=piece.code + each * self.part,
                scale=piece.scale + each * self.part,
            )
            for each, pieces in enumerate(self._pieces)
            for piece in pieces
        ]

    def table(
        self, build: Callable[[Packing, int | None, torch.device], T], rank: int | None, device: torch.device
    ) -> T:
        """What ``build`` makes of the pieces of a rank, or of all; made once."""
        key = (build, rank, device)
        if key not in self._tables:
            self._tables[key] = build(self, rank, device)
        return self._tables[key]

    def _placed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces of a rank with their places in its part."""
        placed = []
        scale, other = self.shard_numel, self._others_at
        for piece in pieces:
            placed.append(piece._replace(code=piece.element if piece.tiles else other, scale=scale))
            scale += piece.blocks * self.quantizer.scale_bytes
            other += 0 if piece.tiles else piece.numel * self.dtype.itemsize
        return placed


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


def _pieces(
    params: Sequence[tuple[int, tuple[int, ...]]], quantizer: Quantizer, shard_numel: int
) -> Iterator[tuple[int, Piece]]:
    """What each rank holds, in the order of the buffer; elements are counted in shards."""
    for offset, shape in sorted(params):
        numel, tiles = math.prod(shape), quantizer.tiles(shape)
        for rank in range(offset // shard_numel, (offset + numel - 1) // shard_numel + 1):
            begin = max(offset, rank * shard_numel)
            end = min(offset + numel, (rank + 1) * shard_numel)
            yield rank, Piece(tiles, begin - offset, end - begin, begin - rank * shard_numel, 0, 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
