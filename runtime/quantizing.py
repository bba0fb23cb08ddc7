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

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..torch_internals import rounds_as_operators
from .block_places import Rectangle, Strips, full_width_strips_of, lines_of, others_of, rectangles_of, strips_of
from .packing import Packing, Quantizer, StochasticQuantizer
from .rounding import Key

_CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}  # worked on at a time without compilation: for caches; for launches
_MOST_KERNELS = 256  # quantizers times dtypes times devices, before compiling fails; by default it would be 8
_MOST_UNROLLED = 8  # parts that a kernel adds up one by one; of more it loops over the ranks


class Kernels(enum.Enum):
    """How the arithmetic runs."""

    EAGER = "operator by operator"
    LINES = "compiled, for all lines of blocks at once"
    TABLES = "compiled, for all blocks at once"

    @staticmethod
    def on(device: torch.device, compiled: bool) -> Kernels:
        """The way that suits a device; without ``compiled``, nothing is compiled."""
        if not compiled:
            return Kernels.EAGER
        return Kernels.LINES if device.type == "cpu" else Kernels.TABLES


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
    # As memory of its own, which it is: compiled code would not write to two views of one storage in one kernel.
    with torch.cuda.device_of(packed):  # on another GPU than the current one it is refused; on a CPU nothing happens
        stored = _stored_scales(from_dlpack(packed), packing.quantizer)
    strips_in_lines = full_width_strips_of  # whole blocks together, whose maxima are sought
    _run_on_strips(_quantize_strips, kernels, strips_in_lines, packing, rank, (key,), (source, packed), (stored,))
    for r in _without_strips(packing, rank, device, kernels):
        uniform = None if key is None else _uniform(r.places(device), key)
        codes, scales = _encoded(packing.quantizer, r.elements(source), uniform)
        r.codes(packed).copy_(codes)
        r.scales(stored).copy_(scales)
    others = packing.table(others_of, rank, device)
    if others.elements.numel():
        values = source.index_select(0, others.elements).to(packing.dtype)
        packed.view(packing.dtype).index_copy_(0, others.places, values)


def dequantize_into(packing: Packing, packed: Tensor, full: Tensor, kernels: Kernels) -> None:
    """Writes the elements of ``packed``, [world_size * P] uint8, to ``full``, [world_size * S]; padding stays."""
    stored = _stored_scales(packed, packing.quantizer)
    _run_on_strips(_dequantize_strips, kernels, lines_of, packing, None, (), (packed, full), (stored,))
    for r in _without_strips(packing, None, full.device, kernels):
        r.elements(full).copy_(_decoded(packing.quantizer, r.codes(packed), r.scales(stored)))
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
        _run_on_strips(_average_strips, kernels, lines_of, packing, rank, (divisor,), flats, stored)
    else:
        stored = [_stored_scales(each, quantizer) for each in (own, received)]
        rest, flats = (divisor, ranks, torch.tensor(rank, device="cpu")), (shard, own, received)
        _run_on_strips(_average_strips_of_many, kernels, lines_of, packing, rank, rest, flats, stored)
    for r in _without_strips(packing, rank, shard.device, kernels):
        parts = _parts(packing, rank, own, received)
        terms = (_decoded(quantizer, r.codes(part), r.scales(_stored_scales(part, quantizer))) for part in parts)
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


# Compiled.


def _run_on_strips(
    function: Callable[..., None],
    kernels: Kernels,
    strips_in_lines: Callable[[Packing, int | None, torch.device], Strips],
    packing: Packing,
    rank: int | None,
    rest: tuple[object, ...],
    flats: Sequence[Tensor],
    stored: Sequence[Tensor],
) -> None:
    """Runs compiled code on all strips: the same for any number of them and any size of ``flats`` and ``stored``."""
    if kernels is Kernels.EAGER:
        return
    in_lines = kernels is Kernels.LINES
    strips = packing.table(strips_in_lines if in_lines else strips_of, rank, flats[0].device)
    if not strips.table.numel():
        return
    if in_lines:
        flats = [_lines(flat, strips.tile[1]) for flat in flats]
    for tensor, dim in ((strips.table, 1), *((flat, 0) for flat in (*flats, *stored))):
        if tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
    with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
        compiled = _compiled(flats[0].device.type, function, packing.quantizer, strips.tile, strips.blocks)
        compiled(strips.table, *rest, *flats, *stored)


@functools.cache
def _compiled(device: str, function: Callable[..., Any], *bound: object) -> Callable[..., Any]:
    # Tables hold places that exist, which nothing has to check. And what takes many operations, as places do, Inductor
    # would keep in memory between two kernels.
    options: dict[str, Any] = {"assert_indirect_indexing": False}
    options |= dict.fromkeys(
        ("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold"), 1 << 20
    )
    if device != "cpu":
        options |= rounds_as_operators()  # for the bits of a block that was quantized without generated code
    return torch.compile(functools.partial(function, *bound), fullgraph=True, options=options)


def _lines(flat: Tensor, w: int) -> Tensor:
    """View of all lines of ``w`` elements, from wherever they begin: what a line is read from by its first element."""
    return flat.as_strided((flat.numel() - w + 1, w), (1, 1), flat.storage_offset())


class _Places(NamedTuple):
    """Where the elements of strips lie, [N, blocks, h, w], and their blocks' scales, [N, blocks, 1, 1]."""

    elements: Tensor
    codes: Tensor
    scales: Tensor

    @staticmethod
    def of(strips: Tensor, tile: tuple[int, int], blocks: int) -> _Places:
        first, line, rows, columns, number, code, scale = (each.view(-1, 1, 1, 1) for each in strips.unbind(0))
        h, w = tile
        counts = functools.partial(torch.arange, device=strips.device)
        block = torch.minimum(counts(blocks).view(-1, 1, 1), number - 1)
        column = torch.minimum(block * w + counts(w), columns - 1)
        row = torch.minimum(counts(h).view(-1, 1), rows - 1)
        within = row * line + column
        return _Places(first + within, code + within, scale + block)


def _read(flat: Tensor, places: Tensor) -> Tensor:
    """What lies at the places, [..., blocks, h, w]; of a view of lines, in the order of memory."""
    return flat[places] if flat.dim() == 1 else flat[_first_of_lines(places)].transpose(-3, -2)


def _write(flat: Tensor, places: Tensor, values: Tensor) -> None:
    if flat.dim() == 1:
        flat.index_put_((places,), values.to(flat.dtype))
    else:
        flat.index_put_((_first_of_lines(places),), values.transpose(-3, -2).to(flat.dtype))


def _first_of_lines(places: Tensor) -> Tensor:
    """[..., h, blocks]"""
    return places[..., 0].transpose(-2, -1)


def _quantize_strips(
    quantizer: Quantizer,
    tile: tuple[int, int],
    blocks: int,
    strips: Tensor,
    key: Key | None,
    source: Tensor,
    packed: Tensor,
    stored: Tensor,
) -> None:
    at = _Places.of(strips, tile, blocks)
    uniform = None if key is None else _uniform(at.elements, key)
    codes, scales = _encoded(quantizer, _read(source, at.elements), uniform)
    _write(packed, at.codes, codes)
    _write(stored, at.scales, scales)


def _dequantize_strips(
    quantizer: Quantizer,
    tile: tuple[int, int],
    blocks: int,
    strips: Tensor,
    packed: Tensor,
    full: Tensor,
    stored: Tensor,
) -> None:
    at = _Places.of(strips, tile, blocks)
    _write(full, at.elements, _decoded(quantizer, _read(packed, at.codes), _read(stored, at.scales)))


def _average_strips(
    quantizer: Quantizer,
    tile: tuple[int, int],
    blocks: int,
    strips: Tensor,
    divisor: Tensor,
    shard: Tensor,
    *parts: Tensor,
) -> None:
    """Of ``parts``: the codes of all ranks, and then the scales."""
    at = _Places.of(strips, tile, blocks)
    ranks = len(parts) // 2
    terms = [
        _decoded(quantizer, _read(codes, at.codes), _read(stored, at.scales))
        for codes, stored in zip(parts[:ranks], parts[ranks:], strict=True)
    ]
    _write(shard, at.elements, functools.reduce(torch.add, terms) / divisor)


def _average_strips_of_many(
    quantizer: Quantizer,
    tile: tuple[int, int],
    blocks: int,
    strips: Tensor,
    divisor: Tensor,
    ranks: int,
    rank: Tensor,
    shard: Tensor,
    own: Tensor,
    received: Tensor,
    own_scales: Tensor,
    received_scales: Tensor,
) -> None:
    at = _Places.of(strips, tile, blocks)
    each = torch.arange(ranks, device=strips.device).view(-1, 1, 1, 1, 1)
    begin = each * own_scales.shape[0]  # of its part, counted in scales
    codes = _read(received, at.codes + begin * quantizer.scale_bytes)
    terms = _decoded(quantizer, codes, _read(received_scales, at.scales + begin))
    own_term = _decoded(quantizer, _read(own, at.codes), _read(own_scales, at.scales))
    _write(shard, at.elements, torch.where(each == rank, own_term, terms).sum(0) / divisor)


# The arithmetic, of blocks in the last two dimensions.


def _encoded(quantizer: Quantizer, source: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes, uint8, and scales, int32."""
    values = source.float()
    scales = quantizer.scale_of(values.abs().amax((2, 3), keepdim=True))
    if uniform is None:
        codes = quantizer.encode(values, scales)
    else:
        codes = cast(StochasticQuantizer, quantizer).encode_stochastically(values, scales, uniform)
    return (codes & 0xFF).to(torch.uint8), scales


def _decoded(quantizer: Quantizer, codes: Tensor, stored: Tensor) -> Tensor:
    """The values, float32, of codes and scales."""
    return quantizer.decode(codes.to(torch.int32), stored.to(torch.int32))


def _uniform(places: Tensor, key: Key) -> Tensor:
    """A number in [0, 1) for each place and key, float32, as if drawn at random.

    Twice a multiply-xorshift hash of 32 bits, in int32, of which vectors hold twice as many as of int64: products wrap
    around, and a right shift is masked to bring no sign.
    """
    word = _mixed(places.to(torch.int32) ^ key[0].to(torch.int32))
    word = _mixed(word + (places >> 32).to(torch.int32) ^ key[1].to(torch.int32))
    return (word >> 8 & 0xFFFFFF).float() * 2.0**-24


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ (word >> 16 & 0xFFFF)) * 0x21F0AAAD
    word = (word ^ (word >> 15 & 0x1FFFF)) * 0x735A2D97
    return word ^ (word >> 15 & 0x1FFFF)
