"""8-bit codes for optimizer states: dynamic maps of 256 values, and one absolute maximum for each block.

The dynamic map is that of "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861, section 2), in the layout
that bitsandbytes and torchao use: seven decades below 1, each divided into twice as many equal cells as the one
below it, and a value in the middle of each cell.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

DECADES = 7
LEAST_SCALE = 1e-12  # of a block of zeros, so that nothing is divided by 0


class Codebook(NamedTuple):
    """A dynamic map, and the tables that find the nearest of its values without a search.

    A float32 without its lower 16 bits is one of 65,536 numbers, and the floats that share one are so close
    together that at most one border between two codes lies among them. So a code is a lookup by the upper 16 bits,
    and one comparison.

    Attributes:
        values: [256] float32, ascending: what each code stands for.
        first: [65536] uint8: the lowest code among the floats that have these upper 16 bits.
        borders: [256] float32: the least float that belongs to the next code; infinity for the last.
    """

    values: Tensor
    first: Tensor
    borders: Tensor


@functools.cache
def codebook(signed: bool, device: torch.device) -> Codebook:
    """The dynamic map for states of both signs, or of none."""
    with torch.device("cpu"):
        values = dynamic_map(signed)
        borders = torch.cat([_borders(values), torch.tensor([math.inf], dtype=torch.float32)])
        tables = Codebook(values, _first_codes(borders), borders)
    return Codebook(*(table.to(device) for table in tables))


def dynamic_map(signed: bool) -> Tensor:
    """The map's values, [256] float32, ascending from -1 (signed) or 0 to 1. Both ends' middles, 0 and 1 are in it."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for decade in range(DECADES):
        cells = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, cells + 1, dtype=torch.float32)
        middles = 10.0 ** (decade - DECADES + 1) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def quantize(scaled: Tensor, book: Codebook) -> Tensor:
    """The code of the nearest value, the upper one of two that are equally near: uint8, of the same shape.

    Args:
        scaled: float32 in [-1, 1].
        book: the map.
    """
    upper = (scaled.view(torch.int32) >> 16) & 0xFFFF
    codes = book.first[upper].to(torch.int32)
    return (codes + (scaled >= book.borders[codes])).to(torch.uint8)


def dequantize(codes: Tensor, book: Codebook) -> Tensor:
    """The values that codes stand for: float32, of the same shape, in [-1, 1]."""
    return book.values[codes.to(torch.int32)]


def block_scales(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The absolute maximum over ``dims``, which are kept with size 1; at least ``LEAST_SCALE``."""
    return values.abs().amax(dims, keepdim=True).clamp(min=LEAST_SCALE)


def _borders(values: Tensor) -> Tensor:
    """For each code but the last, the least float at least half way up to the next value.

    Both the distance from the lower value and half the gap are rounded to float32 first, as they are where nearest
    values are found by subtraction; so the middle itself may be off by some units in the last place.
    """
    low, half_gap = values[:-1], (values[1:] - values[:-1]) * 0.5
    border = low + half_gap
    up, down = torch.tensor([math.inf, -math.inf], dtype=torch.float32)
    while (short := border - low < half_gap).any():
        border = torch.where(short, torch.nextafter(border, up), border)
    while (beyond := torch.nextafter(border, down) - low >= half_gap).any():
        border = torch.where(beyond, torch.nextafter(border, down), border)
    return border


def _first_codes(borders: Tensor) -> Tensor:
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    lowest, highest = upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)
    lowest, highest = torch.minimum(lowest, highest), torch.maximum(lowest, highest)  # negative ones grow downwards
    first, last = (torch.searchsorted(borders, end, right=True).clamp(max=255) for end in (lowest, highest))
    if not bool((((last - first) <= 1) | (lowest.abs() > 1) | lowest.isnan() | highest.isnan()).all()):
        raise AssertionError("two borders of a dynamic map share the upper 16 bits of their floats")
    return first.to(torch.uint8)
