"""Kernels between a unit's elements and their packed form.

One for each direction and any unit: where blocks lie comes from tables. Compiled by Inductor, each is one generated
kernel; without compilation the same operations run in chunks, which takes little memory and gives the same numbers. A
block at a tensor's edge is computed as if it were full, with its last line and column repeated: that changes no
maximum, and writes the same bytes again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .packing import Packing, Quantizer, StochasticQuantizer, Tables

_CHUNK_NUMEL = 1 << 18  # elements that are worked on at a time without compilation
_MOST_KERNELS = 256  # quantizers times dtypes times devices, before compiling fails; by default it would be 8
_PARTS_AT_ONCE = 8  # that one kernel sums
_LOW = 0xFFFFFFFF


def quantize_into(
    packing: Packing, tables: Tables, source: Tensor, packed: Tensor, *, compiled: bool, key: Tensor | None = None
) -> None:
    """Writes the packed form of ``source`` to ``packed``.

    Args:
        packing: of the unit.
        tables: of it, for the whole buffer or for one shard.
        source: elements, [n], of any floating-point dtype.
        packed: [n / S * P] uint8.
        compiled: whether Inductor compiles the kernel.
        key: of stochastic rounding, [2] int64; None rounds to the nearest.
    """
    if key is None:
        _run(_quantize, packing, tables.strips, (source, packed), (), compiled)
    else:
        _run(_quantize_stochastically, packing, tables.strips, (source, packed), (key,), compiled)
    if tables.elements.numel():
        others = source.index_select(0, tables.elements).to(packing.dtype)
        packed.view(packing.dtype).index_copy_(0, tables.places, others)


def dequantize_into(packing: Packing, tables: Tables, packed: Tensor, full: Tensor, *, compiled: bool) -> None:
    """Writes the elements of ``packed``, [n / S * P] uint8, to ``full``, [n]; padding stays as it is."""
    _run(_dequantize, packing, tables.strips, (packed, full), (), compiled)
    if tables.elements.numel():
        others = packed.view(packing.dtype).index_select(0, tables.places)
        full.index_copy_(0, tables.elements, others.to(full.dtype))


def average_into(packing: Packing, tables: Tables, parts: Sequence[Tensor], shard: Tensor, *, compiled: bool) -> None:
    """Averages dequantized parts, in float32 and in the order of ranks; padding stays undefined.

    Args:
        packing: of the unit.
        tables: of it, for one shard.
        parts: of the shard, one from each rank, [P] uint8.
        shard: takes the average, [S].
        compiled: whether Inductor compiles the kernel.
    """
    world = packing.world_size
    at_once = world <= _PARTS_AT_ONCE
    total = shard if at_once or shard.dtype == torch.float32 else torch.empty_like(shard, dtype=torch.float32)
    for first in range(0, world, _PARTS_AT_ONCE):
        some = parts[first : first + _PARTS_AT_ONCE]
        divisor = torch.tensor(float(world if first + _PARTS_AT_ONCE >= world else 1), device="cpu")
        _run(_add if first else _sum, packing, tables.strips, (total, *some), (divisor,), compiled)
    if tables.elements.numel():
        others = (part.view(packing.dtype).index_select(0, tables.places).float() for part in parts)
        total.index_copy_(0, tables.elements, (functools.reduce(torch.add, others) / world).to(total.dtype))
    if total is not shard:
        shard.copy_(total)


def _run(
    kernel: Callable[..., None],
    packing: Packing,
    strips: Tensor,
    flats: tuple[Tensor, ...],
    others: tuple[Tensor, ...],
    compiled: bool,
) -> None:
    """Runs ``kernel`` on all strips. ``flats`` are tensors of one dimension, the same code for any size of which."""
    h, w = packing.quantizer.tile
    if not strips.numel():
        return
    if compiled:
        for tensor, dim in ((strips, 1), *((flat, 0) for flat in flats)):
            if tensor.shape[dim] > 1:
                torch._dynamo.mark_dynamic(tensor, dim)
        with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
            _compiled(kernel, packing.quantizer, packing.across)(strips, *flats, *others)
        return
    for some in strips.split(max(1, _CHUNK_NUMEL // (h * packing.across * w)), dim=1):
        kernel(packing.quantizer, packing.across, some, *flats, *others)


@functools.cache
def _compiled(kernel: Callable[..., None], quantizer: Quantizer, across: int) -> Callable[..., None]:
    # Tables hold places that exist, which nothing has to check.
    options: dict[str, Any] = {"assert_indirect_indexing": False}
    return torch.compile(functools.partial(kernel, quantizer, across), fullgraph=True, options=options)


class _Places(NamedTuple):
    """Where the elements of strips lie, [N, h, across, w], and their blocks' scales, [N, 1, across, 1]."""

    elements: Tensor
    codes: Tensor
    scales: Tensor

    @staticmethod
    def of(strips: Tensor, quantizer: Quantizer, across: int) -> _Places:
        first, line, rows, columns, code, scale = (each.view(-1, 1, 1, 1) for each in strips.unbind(0))
        h, w = quantizer.tile
        counts = functools.partial(torch.arange, device=strips.device)
        block = torch.minimum(counts(across).view(1, 1, -1, 1), (columns - 1) // w)
        column = torch.minimum(block * w + counts(w), columns - 1)
        row = torch.minimum(counts(h).view(1, -1, 1, 1), rows - 1)
        within = row * line + column
        return _Places(first + within, code + within, scale + block * quantizer.scale_bytes)


def _quantize(quantizer: Quantizer, across: int, strips: Tensor, source: Tensor, packed: Tensor) -> None:
    at = _Places.of(strips, quantizer, across)
    values = source[at.elements].float()
    scales = _scales_of(values, quantizer)
    _store(packed, at, quantizer, quantizer.encode(values, scales), scales)


def _quantize_stochastically(
    quantizer: StochasticQuantizer, across: int, strips: Tensor, source: Tensor, packed: Tensor, key: Tensor
) -> None:
    at = _Places.of(strips, quantizer, across)
    values = source[at.elements].float()
    scales = _scales_of(values, quantizer)
    codes = quantizer.encode_stochastically(values, scales, _uniform(at.elements, key))
    _store(packed, at, quantizer, codes, scales)


def _dequantize(quantizer: Quantizer, across: int, strips: Tensor, packed: Tensor, full: Tensor) -> None:
    at = _Places.of(strips, quantizer, across)
    full.index_put_((at.elements,), _load(packed, at, quantizer).to(full.dtype))


def _sum(quantizer: Quantizer, across: int, strips: Tensor, total: Tensor, *rest: Tensor) -> None:
    """Averages parts, [P] each, which the number to divide by follows."""
    *parts, divisor = rest
    at = _Places.of(strips, quantizer, across)
    terms = (_load(part, at, quantizer) for part in parts)
    total.index_put_((at.elements,), (functools.reduce(torch.add, terms) / divisor).to(total.dtype))


def _add(quantizer: Quantizer, across: int, strips: Tensor, total: Tensor, *rest: Tensor) -> None:
    """As :func:`_sum`, of parts after those that ``total`` is the sum of."""
    *parts, divisor = rest
    at = _Places.of(strips, quantizer, across)
    terms = (_load(part, at, quantizer) for part in parts)
    total.index_put_((at.elements,), functools.reduce(torch.add, terms, total[at.elements]) / divisor)


def _scales_of(values: Tensor, quantizer: Quantizer) -> Tensor:
    return quantizer.scale_of(values.abs().amax((1, 3), keepdim=True))


def _store(packed: Tensor, at: _Places, quantizer: Quantizer, codes: Tensor, scales: Tensor) -> None:
    packed.index_put_((at.codes,), (codes & 0xFF).to(torch.uint8))
    for byte in range(quantizer.scale_bytes):
        packed.index_put_((at.scales + byte,), (scales >> 8 * byte & 0xFF).to(torch.uint8))


def _load(packed: Tensor, at: _Places, quantizer: Quantizer) -> Tensor:
    """The values, float32, of codes in ``packed``."""
    scales = packed[at.scales].to(torch.int32)
    for byte in range(1, quantizer.scale_bytes):
        scales = scales | packed[at.scales + byte].to(torch.int32) << 8 * byte
    return quantizer.decode(packed[at.codes].to(torch.int32), scales)


def _uniform(places: Tensor, key: Tensor) -> Tensor:
    """A number in [0, 1) for each place and key, float32, as if drawn at random.

    Twice a multiply-xorshift hash of 32 bits. Both factors have 31 bits, so that no product overflows int64.
    """
    word = _mixed((places & _LOW) ^ key[0])
    word = _mixed((word + (places >> 32)) & _LOW ^ key[1])
    return (word >> 8).float() * 2.0**-24


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ (word >> 16)) * 0x21F0AAAD & _LOW
    word = (word ^ (word >> 15)) * 0x735A2D97 & _LOW
    return word ^ (word >> 15)
