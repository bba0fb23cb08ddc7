"""Quantized communication: how parameters, or gradients, are quantized in blocks of which none is cut.

``fully_shard(quantize=BlockFP8())`` gathers codes of one byte and a scale for each block, where each rank quantizes the
blocks of its own shard: no block is cut, so no rank has to know another's maxima (veScale-FSDP, arXiv 2602.22437). What
is gathered equals, bit for bit, the whole tensor quantized on one rank. Shards keep their values and their dtype.

Parameters of two or more dimensions are quantized. The others, norms and most biases, are few and every bit of them
counts: they travel in the same buffer as they are. A parameter's shape decides, never what a rank holds of it, so that
a stack of experts' biases, [experts, n], is quantized. A function in the quantizer's place decides by name: what it
leaves out, or gives another quantizer, has a buffer of its own in its unit, as what has another dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .planner import Elements, Granularity, Rows
from .runtime.packing import Tiles

_LEAST_SCALE = torch.finfo(torch.float32).tiny  # of a block of zeros, so that nothing is divided by 0
_INT8_MAX = 127.0
_E4M3_MAX = 448.0
_MX_BLOCK = 32
_LEFT_OUT = (
    "or leave it out, by a function of its name: quantize=lambda name, param: None if 'router' in name else "
    "vc.BlockFP8(); quantize_gradients takes one, too"
)


class Quantized(NamedTuple):
    """A tensor as codes and scales.

    Attributes:
        codes: uint8, of the tensor's shape.
        scales: int32, [matrices, rows of blocks, blocks across]: float32 bit by bit, or, for MXFP8, E8M0.
    """

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class BlockQuantizer(ABC):
    """What the formats have in common. The whole-tensor functions say what the gathered values are."""

    scale_bytes: ClassVar[int] = 4

    def granularity(self, name: str, parameter: Tensor) -> Granularity | None:
        """What ``fully_shard`` must not cut in a parameter; it asks by itself.

        Raises:
            ValueError: blocks are larger than the parameter.
        """
        try:
            tiles = self.tiles(parameter.shape) if parameter.is_floating_point() else None
        except ValueError as error:
            raise ValueError(f"parameter {name!r} of shape {tuple(parameter.shape)}: {error}") from None
        if tiles is None:
            return None
        if tiles.consecutive:
            return Elements(tiles.w)
        # Tiles begin anew in each matrix, so where they do not divide it, cuts fall between matrices.
        return Rows(tiles.h if tiles.matrices == 1 or tiles.rows % tiles.h == 0 else tiles.rows)

    def quantize(self, tensor: Tensor) -> Quantized:
        """The whole tensor's codes and scales.

        Args:
            tensor: of two or more dimensions and any floating-point dtype.

        Raises:
            ValueError: fewer dimensions, or blocks larger than the tensor.
        """
        blocks = _in_blocks(tensor.detach().float(), self._tiles(tensor.shape))
        scales = self.scale_of(blocks.abs().amax((2, 4), keepdim=True))
        codes = (self.encode(blocks, scales) & 0xFF).to(torch.uint8)
        return Quantized(_from_blocks(codes, self._tiles(tensor.shape)).view(tensor.shape), scales[:, :, 0, :, 0])

    def dequantize(self, quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        """What :meth:`quantize` made of a tensor, as ``dtype``: computed in float32 and rounded once.

        Args:
            quantized: codes, uint8, of the tensor's shape, and their scales.
            dtype: of the result, which has the codes' shape.
        """
        codes, scales = quantized
        tiles = self._tiles(codes.shape)
        values = self.decode(_in_blocks(codes, tiles).to(torch.int32), scales[:, :, None, :, None])
        return _from_blocks(values, tiles).view(codes.shape).to(dtype)

    def _tiles(self, shape: Sequence[int]) -> Tiles:
        tiles = self.tiles(shape)
        if tiles is None:
            raise ValueError(f"a tensor of shape {tuple(shape)} is not quantized: two or more dimensions are")
        return tiles

    @property
    @abstractmethod
    def tile(self) -> tuple[int, int]:
        """Rows and columns of its blocks, in the matrix of :attr:`Tiles`."""

    @abstractmethod
    def tiles(self, shape: Sequence[int]) -> Tiles | None:
        """The blocks of a tensor of ``shape``; None if it is not quantized.

        Raises:
            ValueError: blocks larger than the tensor.
        """

    @abstractmethod
    def scale_of(self, largest: Tensor) -> Tensor:
        """The scale that is stored for blocks whose absolute maxima are ``largest``, float32: int32, same shape."""

    @abstractmethod
    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        """Codes of float32 values: int32, of which the low 8 bits count."""

    @abstractmethod
    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The float32 values of codes, int32 in 0 to 255."""


@dataclass(frozen=True)
class BlockInt8(BlockQuantizer):
    """Blocks of consecutive elements as integers from -127 to 127 times ``amax / 127``, rounded to the nearest.

    A block with a NaN or an infinity comes out as one without finite values. A tensor takes 1 + 4 / block bytes for
    each element.

    Args:
        block: elements of a block.
        seed: of stochastic rounding, as ``fully_shard(quantize_gradients=)`` has it; None there means 0. Parameters
            are rounded to the nearest, so for them it must be None.

    Raises:
        TypeError, ValueError: a block that is no positive integer, or a seed that is no integer.
    """

    block: int = 256
    seed: int | None = None

    def __post_init__(self) -> None:
        check_size("BlockInt8: block", self.block)
        if self.seed is not None and type(self.seed) is not int:
            raise TypeError(f"BlockInt8: seed is {self.seed!r}; give an integer, or None")

    @property
    def tile(self) -> tuple[int, int]:
        return 1, self.block

    def tiles(self, shape: Sequence[int]) -> Tiles | None:
        if len(shape) < 2:
            return None
        numel = math.prod(shape)
        if numel < self.block:
            raise ValueError(
                f"blocks of {self.block} are larger than it, {numel} elements. Take smaller ones, "
                f"vc.BlockInt8(block=...), {_LEFT_OUT}"
            )
        return Tiles(1, 1, numel, 1, self.block)

    def scale_of(self, largest: Tensor) -> Tensor:
        return (largest / _INT8_MAX).clamp(min=_LEAST_SCALE).view(torch.int32)

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        return (values / scales.view(torch.float32)).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int32)

    def encode_stochastically(self, values: Tensor, scales: Tensor, uniform: Tensor) -> Tensor:
        """As :meth:`encode`, up or down at random, so that the mean is the value; ``uniform`` is in [0, 1)."""
        scaled = values / scales.view(torch.float32)
        lower = scaled.floor()
        # Compared by a difference, because storing and loading masks takes CPUs longer than all the rest.
        up = (scaled - lower - uniform).clamp(min=0).ceil()
        return (lower + up).clamp(-_INT8_MAX, _INT8_MAX).to(torch.int32)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return ((codes ^ 0x80) - 0x80).float() * scales.view(torch.float32)


@dataclass(frozen=True)
class BlockFP8(BlockQuantizer):
    """Tiles of a matrix as 8-bit floats (E4M3: 4 bits of exponent, 3 of mantissa, at most 448) times ``amax / 448``.

    Of a tensor of three or more dimensions, a stack of experts, each matrix of the last two has tiles of its own; if
    they do not divide it, shards are cut between matrices only. Tiles at the edges may be smaller. A tile with a NaN
    or an infinity comes out as NaN. A tensor takes 1 + 4 / (h * w) bytes for each element.

    Args:
        tile: rows and columns, h and w.

    Raises:
        TypeError, ValueError: not two positive integers.
    """

    tile: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        if not isinstance(self.tile, list | tuple) or len(self.tile) != 2:
            raise TypeError(f"BlockFP8: tile is {self.tile!r}; give (rows, columns)")
        for side in self.tile:
            check_size("BlockFP8: tile", side)
        object.__setattr__(self, "tile", tuple(self.tile))

    def tiles(self, shape: Sequence[int]) -> Tiles | None:
        if len(shape) < 2:
            return None
        *_, rows, cols = shape
        h, w = self.tile
        if h > rows or w > cols:
            raise ValueError(
                f"tiles of {h} x {w} are larger than its matrices of {rows} x {cols}. Take a smaller tile in "
                f"vc.BlockFP8(tile=...), or vc.BlockInt8, {_LEFT_OUT}"
            )
        return Tiles(math.prod(shape[:-2]), rows, cols, h, w)

    def scale_of(self, largest: Tensor) -> Tensor:
        return (largest / _E4M3_MAX).clamp(min=_LEAST_SCALE).view(torch.int32)

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        return _to_e4m3(values / scales.view(torch.float32))

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return _from_e4m3(codes) * scales.view(torch.float32)


@dataclass(frozen=True)
class MXFP8(BlockQuantizer):
    """Blocks of 32 elements of a row as E4M3 times a power of two (OCP Microscaling Formats, version 1.0, section 5).

    The power of two is the largest in the block's absolute maximum, divided by that in 448; what it leaves above 448
    becomes 448. A row's last block may be shorter. A block with a NaN or an infinity comes out as NaN. A tensor takes
    1 + 1/32 bytes for each element. ``fully_shard`` raises ValueError for rows of fewer than 32 elements.
    """

    scale_bytes: ClassVar[int] = 1

    @property
    def tile(self) -> tuple[int, int]:
        return 1, _MX_BLOCK

    def tiles(self, shape: Sequence[int]) -> Tiles | None:
        if len(shape) < 2:
            return None
        if shape[-1] < _MX_BLOCK:
            raise ValueError(
                f"vc.MXFP8 has blocks of {_MX_BLOCK} elements, and its rows have {shape[-1]}. Take vc.BlockInt8, "
                f"{_LEFT_OUT}"
            )
        if shape[-1] % _MX_BLOCK == 0:  # then blocks go on from row to row
            return Tiles(1, 1, math.prod(shape), 1, _MX_BLOCK)
        return Tiles(1, math.prod(shape[:-1]), shape[-1], 1, _MX_BLOCK)

    def scale_of(self, largest: Tensor) -> Tensor:
        exponent = largest.view(torch.int32) >> 23 & 0xFF
        return torch.where(exponent == 0xFF, exponent, (exponent - 8).clamp(min=0))  # 8 is that of 448

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        inverse = (254 - scales).clamp(min=1) << 23
        return _to_e4m3(values * inverse.view(torch.float32))

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        power = torch.where(scales == 0, 1 << 22, scales << 23).view(torch.float32)  # 2 ** -127 is subnormal
        return _from_e4m3(codes) * torch.where(scales == 0xFF, torch.nan, power)


def _to_e4m3(values: Tensor) -> Tensor:
    """float32 to the nearest E4M3, ties to even, saturating at 448; the code in int32. By integer arithmetic, because
    not every device has the type."""
    values = values.clamp(-_E4M3_MAX, _E4M3_MAX)
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + (magnitude >> 20 & 1) >> 20) - (120 << 3)
    subnormal = (values.abs() * 512).round().to(torch.int32)  # multiples of 2 ** -9, up to 2 ** -6
    code = torch.where(magnitude < 0x3C800000, subnormal, normal)
    return torch.where(values.isnan(), 0x7F, code) | bits >> 24 & 0x80


def _from_e4m3(codes: Tensor) -> Tensor:
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (exponent + 120 << 23 | mantissa << 20).view(torch.float32)
    magnitude = torch.where(exponent == 0, mantissa.float() * 2.0**-9, normal)
    magnitude = torch.where(codes & 0x7F == 0x7F, torch.nan, magnitude)
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def _in_blocks(tensor: Tensor, tiles: Tiles) -> Tensor:
    """[matrices, rows of tiles, h, tiles across, w]: with zeros where a tile at an edge is smaller."""
    matrices, rows, cols, h, w = tiles
    padded = F.pad(tensor.reshape(matrices, rows, cols), (0, -cols % w, 0, -rows % h))
    return padded.view(matrices, -(-rows // h), h, -(-cols // w), w)


def _from_blocks(blocks: Tensor, tiles: Tiles) -> Tensor:
    matrices, rows, cols, *_ = tiles
    high, wide = blocks.shape[1] * blocks.shape[2], blocks.shape[3] * blocks.shape[4]
    return blocks.reshape(matrices, high, wide)[:, :rows, :cols].reshape(-1)


def check_size(what: str, size: object) -> None:
    """Raises TypeError or ValueError unless ``size``, of ``what``, is a number of elements that a block can have."""
    if type(size) is not int:
        raise TypeError(f"{what} holds {size!r}; give whole numbers of elements")
    if size < 1:
        raise ValueError(f"{what} holds {size}; a block has at least 1 element")
