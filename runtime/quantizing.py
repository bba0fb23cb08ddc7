"""Kernels between a unit's elements and their packed form.

The arithmetic is written once, and runs in three ways, with the same results:

- operator by operator, on rectangles of blocks, a chunk at a time, so that it takes little memory;
- compiled, from a table of all blocks: one kernel for a unit, whatever its parameters and however many ranks it is
  sharded over. A block at a tensor's edge is computed as if it were full, with its last line and column repeated: that
  changes no maximum, and writes the same bytes again;
- compiled, from a table of all blocks of full width, in whole lines, as a CPU likes it. Narrower ones, at the edge of a
  tensor whose lines no tile divides, are computed operator by operator.

Elements that are not quantized are few, and moved by two kernels of PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from .block_arithmetic import decoded, encoded, uniform_at
from .block_places import Rectangle, full_width_strips_of, lines_of, others_of, rectangles_of
from .packing import Packing, Quantizer
from .rounding import Key
from .strips import Kernels, average_strips, average_strips_of_many, dequantize_strips, quantize_strips, run_on_strips

_CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}  # worked on at a time without compilation: for caches; for launches
_MOST_UNROLLED = 8  # parts that a kernel adds up one by one; of more it loops over the ranks


def quantize_into(
    packing: Packing, rank: int | None, source: Tensor, packed: Tensor, kernels: Kernels, key: Key | None = None
) -> None:
    """Writes the packed form of ``source`` to ``packed``.

    Args:
        packing: of the unit.
        rank: whose shard and part of the packed buffer these are; None for the whole buffers.
        source: elements, [S] or [world_size * S], of any floating-point dtype.
        packed: [P] or [world_size * P] uint8.
        kernels: how it is computed.
        key: of stochastic rounding; None rounds to the nearest.
    """
    device = source.device
    stored = _stored_scales(packed, packing.quantizer)
    strips_in_lines = full_width_strips_of  # whole blocks together, whose maxima are sought
    run_on_strips(quantize_strips, kernels, strips_in_lines, packing, rank, (key,), (source, packed), (stored,))
    for r in _without_strips(packing, rank, device, kernels):
        uniform = None if key is None else uniform_at(r.places(device), key)
        codes, scales = encoded(packing.quantizer, r.elements(source), uniform)
        r.codes(packed).copy_(codes)
        r.scales(stored).copy_(scales)
    others = packing.table(others_of, rank, device)
    if others.elements.numel():
        values = source.index_select(0, others.elements).to(packing.dtype)
        packed.view(packing.dtype).index_copy_(0, others.places, values)


def dequantize_into(packing: Packing, packed: Tensor, full: Tensor, kernels: Kernels) -> None:
    """Writes the elements of ``packed``, [world_size * P] uint8, to ``full``, [world_size * S]; padding stays."""
    stored = _stored_scales(packed, packing.quantizer)
    run_on_strips(dequantize_strips, kernels, lines_of, packing, None, (), (packed, full), (stored,))
    for r in _without_strips(packing, None, full.device, kernels):
        r.elements(full).copy_(decoded(packing.quantizer, r.codes(packed), r.scales(stored)))
    others = packing.table(others_of, None, full.device)
    if others.elements.numel():
        values = packed.view(packing.dtype).index_select(0, others.places)
        full.index_copy_(0, others.elements, values.to(full.dtype))


def average_into(packing: Packing, rank: int, own: Tensor, received: Tensor, shard: Tensor, kernels: Kernels) -> None:
    """Averages what all ranks have of a shard, dequantized, in float32, by one kernel; padding stays undefined.

    They are added in the order of ranks, but by a GPU's kernel that loops over them, which adds some side by side.

    Args:
        packing: of the unit.
        rank: whose shard it is.
        own: its part, [P] uint8.
        received: all parts, [world_size * P] uint8; what lies in its own place has no meaning.
        shard: takes the average, [S].
        kernels: how it is computed.
    """
    ranks, quantizer = packing.world_size, packing.quantizer
    # On a GPU, PyTorch's own kernels would multiply by the reciprocal of a number on the CPU.
    divisor = torch.full((), float(ranks), device=shard.device if kernels is Kernels.EAGER else "cpu")
    if ranks <= _MOST_UNROLLED:
        parts = _parts(packing, rank, own, received)
        stored = [_stored_scales(part, quantizer) for part in parts]
        flats = (shard, *parts)
        run_on_strips(average_strips, kernels, lines_of, packing, rank, (divisor,), flats, stored)
    else:
        stored = [_stored_scales(each, quantizer) for each in (own, received)]
        rest, flats = (divisor, ranks, torch.tensor(rank, device="cpu")), (shard, own, received)
        run_on_strips(average_strips_of_many, kernels, lines_of, packing, rank, rest, flats, stored)
    for r in _without_strips(packing, rank, shard.device, kernels):
        parts = _parts(packing, rank, own, received)
        terms = (decoded(quantizer, r.codes(part), r.scales(_stored_scales(part, quantizer))) for part in parts)
        r.elements(shard).copy_(functools.reduce(torch.add, terms) / divisor)
    others = packing.table(others_of, rank, shard.device)
    if others.elements.numel():
        values = received.view(packing.dtype).view(ranks, -1).index_select(1, others.places)
        torch.index_select(own.view(packing.dtype), 0, others.places, out=values[rank])
        average = values.sum(0, dtype=torch.float32) / ranks
        shard.index_copy_(0, others.elements, average.to(shard.dtype))


def _parts(packing: Packing, rank: int, own: Tensor, received: Tensor) -> list[Tensor]:
    """That of each rank."""
    parts = list(received.split(packing.part))
    parts[rank] = own
    return parts


def _stored_scales(packed: Tensor, quantizer: Quantizer) -> Tensor:
    """A packed buffer as an array of scales."""
    return packed.view(torch.int32) if quantizer.scale_bytes == 4 else packed


def _without_strips(packing: Packing, rank: int | None, device: torch.device, kernels: Kernels) -> Iterator[Rectangle]:
    """What is computed operator by operator, a chunk at a time."""
    if kernels is Kernels.TABLES:
        return
    for rectangle in packing.table(rectangles_of, rank, device):
        if kernels is Kernels.EAGER or rectangle.w < packing.quantizer.tile[1]:
            yield from rectangle.chunks(_CHUNK_NUMEL[device.type])
