"""Kernels between a unit's elements and their packed form.

The arithmetic is written once, and runs in three ways, with the same results:

- operator by operator, on rectangles of blocks, a chunk at a time, so that it takes little memory;
- compiled, on rectangles of blocks: a kernel for each, as a CPU likes it;
- compiled, from a table of all blocks: one kernel for a unit, whatever its parameters and however many ranks it is
  sharded over, as a GPU likes it. A block at a tensor's edge is then computed as if it were full, with its last line
  and column repeated: that changes no maximum, and writes the same bytes again.

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

from .block_places import Rectangle, others_of, rectangles_of, strips_of
from .packing import Packing, Quantizer, StochasticQuantizer

_CHUNK_NUMEL = 1 << 18  # elements that are worked on at a time without compilation
_MOST_KERNELS = 256  # quantizers times dtypes times devices, before compiling fails; by default it would be 8
_PARTS_AT_ONCE = 8  # that one kernel sums
_LOW = 0xFFFFFFFF


class Kernels(enum.Enum):
    """How the arithmetic runs."""

    EAGER = "operator by operator"
    RECTANGLES = "compiled, for each rectangle of blocks"
    TABLES = "compiled, for all blocks at once"

    @staticmethod
    def on(device: torch.device, compiled: bool) -> Kernels:
        """The way that suits a device; without ``compiled``, nothing is compiled."""
        if not compiled:
            return Kernels.EAGER
        return Kernels.RECTANGLES if device.type == "cpu" else Kernels.TABLES


def quantize_into(
    packing: Packing, rank: int | None, source: Tensor, packed: Tensor, kernels: Kernels, key: Tensor | None = None
) -> None:
    """Writes the packed form of ``source`` to ``packed``.

    Args:
        packing: of the unit.
        rank: whose shard and part of the packed buffer these are; None for the whole buffers.
        source: elements, [S] or [world_size * S], of any floating-point dtype.
        packed: [P] or [world_size * P] uint8.
        kernels: how it is computed.
        key: of stochastic rounding, [2] int64; None rounds to the nearest.
    """
    device = source.device
    # As memory of its own, which it is: compiled code would not write to two views of one storage in one kernel.
    stored = _stored_scales(from_dlpack(packed), packing.quantizer)
    if kernels is Kernels.TABLES:
        _run_on_strips(_quantize_strips, packing, rank, (source, packed, stored), (key,))
    else:
        for r, run in _on_rectangles(packing, rank, device, kernels):
            place = None if key is None else torch.tensor([r.element, r.band, r.across, r.line], device="cpu")
            run(_quantize_views, (r.elements(source), r.codes(packed), r.scales(stored)), (place, key))
    others = packing.table(others_of, rank, device)
    if others.elements.numel():
        values = source.index_select(0, others.elements).to(packing.dtype)
        packed.view(packing.dtype).index_copy_(0, others.places, values)


def dequantize_into(packing: Packing, packed: Tensor, full: Tensor, kernels: Kernels) -> None:
    """Writes the elements of ``packed``, [world_size * P] uint8, to ``full``, [world_size * S]; padding stays."""
    stored = _stored_scales(packed, packing.quantizer)
    if kernels is Kernels.TABLES:
        _run_on_strips(_dequantize_strips, packing, None, (packed, stored, full), ())
    else:
        for r, run in _on_rectangles(packing, None, full.device, kernels):
            run(_dequantize_views, (r.codes(packed), r.scales(stored), r.elements(full)), ())
    others = packing.table(others_of, None, full.device)
    if others.elements.numel():
        values = packed.view(packing.dtype).index_select(0, others.places)
        full.index_copy_(0, others.elements, values.to(full.dtype))


def average_into(packing: Packing, rank: int, parts: Sequence[Tensor], shard: Tensor, kernels: Kernels) -> None:
    """Averages dequantized parts, in float32 and in the order of ranks; padding stays undefined.

    Args:
        packing: of the unit.
        rank: whose shard it is.
        parts: of the shard, one from each rank, [P] uint8.
        shard: takes the average, [S].
        kernels: how it is computed.
    """
    at_once = len(parts) <= _PARTS_AT_ONCE
    total = shard if at_once or shard.dtype == torch.float32 else torch.empty_like(shard, dtype=torch.float32)
    for first in range(0, len(parts), _PARTS_AT_ONCE):
        some = parts[first : first + _PARTS_AT_ONCE]
        last = first + _PARTS_AT_ONCE >= len(parts)
        divisor = torch.tensor(float(len(parts) if last else 1), device="cpu")
        _add_parts(packing, rank, some, total, divisor, kernels, first > 0)
    others = packing.table(others_of, rank, shard.device)
    if others.elements.numel():
        values = (part.view(packing.dtype).index_select(0, others.places).float() for part in parts)
        total.index_copy_(0, others.elements, (functools.reduce(torch.add, values) / len(parts)).to(total.dtype))
    if total is not shard:
        shard.copy_(total)


def _add_parts(
    packing: Packing,
    rank: int,
    parts: Sequence[Tensor],
    total: Tensor,
    divisor: Tensor,
    kernels: Kernels,
    accumulate: bool,
) -> None:
    """``total = (total + parts) / divisor``, or without ``total`` on the right."""
    stored = [_stored_scales(part, packing.quantizer) for part in parts]
    if kernels is Kernels.TABLES:
        _run_on_strips(_sum_strips, packing, rank, (total, *parts, *stored), (divisor, accumulate))
        return
    for r, run in _on_rectangles(packing, rank, total.device, kernels):
        codes = [r.codes(part) for part in parts]
        scales = [r.scales(each) for each in stored]
        run(_sum_views, (r.elements(total), *codes, *scales), (divisor, accumulate))


def _stored_scales(packed: Tensor, quantizer: Quantizer) -> Tensor:
    """A packed buffer as an array of scales."""
    return packed.view(torch.int32) if quantizer.scale_bytes == 4 else packed


# On rectangles.


def _on_rectangles(
    packing: Packing, rank: int | None, device: torch.device, kernels: Kernels
) -> Iterator[tuple[Rectangle, Callable[..., Any]]]:
    """Rectangles of blocks, and what runs a function of views of each. Blocks at a tensor's edge are few and of many
    sizes: they are not compiled."""
    for rectangle in packing.table(rectangles_of, rank, device):
        if kernels is Kernels.RECTANGLES and rectangle.whole:
            yield rectangle, functools.partial(_run_compiled, quantizer=packing.quantizer)
        else:
            for chunk in rectangle.chunks(_CHUNK_NUMEL):
                yield chunk, functools.partial(_run_eager, quantizer=packing.quantizer)


def _run_eager(
    function: Callable[..., Any], views: tuple[Tensor, ...], rest: tuple[object, ...], *, quantizer: Quantizer
) -> Any:
    return function(quantizer, *rest, *views)


def _run_compiled(
    function: Callable[..., Any], views: tuple[Tensor, ...], rest: tuple[object, ...], *, quantizer: Quantizer
) -> Any:
    """The same code for any number of rows and columns of blocks."""
    for view in views:
        for dim in (0, 1):
            if view.shape[dim] > 1:
                torch._dynamo.mark_dynamic(view, dim)
    with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
        return _compiled(function, quantizer)(*rest, *views)


@functools.cache
def _compiled(function: Callable[..., Any], *bound: object) -> Callable[..., Any]:
    # Tables hold places that exist, which nothing has to check.
    options: dict[str, Any] = {"assert_indirect_indexing": False}
    return torch.compile(functools.partial(function, *bound), fullgraph=True, options=options)


def _quantize_views(
    quantizer: Quantizer, place: Tensor | None, key: Tensor | None, source: Tensor, codes: Tensor, stored: Tensor
) -> None:
    uniform = None
    if place is not None and key is not None:
        rows, columns, h, w = (torch.arange(n, device=source.device) for n in source.shape)
        first = place[0] + rows.view(-1, 1, 1, 1) * place[1] + columns.view(-1, 1, 1) * place[2]
        uniform = _uniform(first + h.view(-1, 1) * place[3] + w, key)
    encoded, scales = _encoded(quantizer, source, uniform)
    codes.copy_(encoded)
    stored.copy_(scales)


def _dequantize_views(quantizer: Quantizer, codes: Tensor, stored: Tensor, full: Tensor) -> None:
    full.copy_(_decoded(quantizer, codes, stored).to(full.dtype))


def _sum_views(quantizer: Quantizer, divisor: Tensor, accumulate: bool, total: Tensor, *parts: Tensor) -> None:
    terms = [_decoded(quantizer, codes, stored) for codes, stored in _pairs(parts)]
    total.copy_(_mean(total if accumulate else None, terms, divisor).to(total.dtype))


def _pairs(parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Codes and scales of each part, which come as all codes and then all scales."""
    half = len(parts) // 2
    return zip(parts[:half], parts[half:], strict=True)


# From tables.


def _run_on_strips(
    function: Callable[..., None],
    packing: Packing,
    rank: int | None,
    flats: tuple[Tensor, ...],
    rest: tuple[object, ...],
) -> None:
    """Runs compiled code on all strips: the same for any number of them and any size of ``flats``."""
    strips, blocks = packing.table(strips_of, rank, flats[0].device)
    if not strips.numel():
        return
    for tensor, dim in ((strips, 1), *((flat, 0) for flat in flats)):
        if tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
    with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
        _compiled(function, packing.quantizer, blocks)(strips, *rest, *flats)


class _Places(NamedTuple):
    """Where the elements of strips lie, [N, blocks, h, w], and their blocks' scales, [N, blocks, 1, 1]."""

    elements: Tensor
    codes: Tensor
    scales: Tensor

    @staticmethod
    def of(strips: Tensor, quantizer: Quantizer, blocks: int) -> _Places:
        first, line, rows, columns, code, scale = (each.view(-1, 1, 1, 1) for each in strips.unbind(0))
        h, w = quantizer.tile
        counts = functools.partial(torch.arange, device=strips.device)
        block = torch.minimum(counts(blocks).view(-1, 1, 1), (columns - 1) // w)
        column = torch.minimum(block * w + counts(w), columns - 1)
        row = torch.minimum(counts(h).view(-1, 1), rows - 1)
        within = row * line + column
        return _Places(first + within, code + within, scale + block)


def _quantize_strips(
    quantizer: Quantizer,
    blocks: int,
    strips: Tensor,
    key: Tensor | None,
    source: Tensor,
    packed: Tensor,
    stored: Tensor,
) -> None:
    at = _Places.of(strips, quantizer, blocks)
    uniform = None if key is None else _uniform(at.elements, key)
    codes, scales = _encoded(quantizer, source[at.elements], uniform)
    packed.index_put_((at.codes,), codes)
    stored.index_put_((at.scales,), scales.to(stored.dtype))


def _dequantize_strips(
    quantizer: Quantizer, blocks: int, strips: Tensor, packed: Tensor, stored: Tensor, full: Tensor
) -> None:
    at = _Places.of(strips, quantizer, blocks)
    full.index_put_((at.elements,), _decoded(quantizer, packed[at.codes], stored[at.scales]).to(full.dtype))


def _sum_strips(
    quantizer: Quantizer,
    blocks: int,
    strips: Tensor,
    divisor: Tensor,
    accumulate: bool,
    total: Tensor,
    *parts: Tensor,
) -> None:
    at = _Places.of(strips, quantizer, blocks)
    terms = [_decoded(quantizer, codes[at.codes], stored[at.scales]) for codes, stored in _pairs(parts)]
    mean = _mean(total[at.elements] if accumulate else None, terms, divisor)
    total.index_put_((at.elements,), mean.to(total.dtype))


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


def _mean(total: Tensor | None, terms: Sequence[Tensor], divisor: Tensor) -> Tensor:
    before = [] if total is None else [total]
    return functools.reduce(torch.add, [*before, *terms]) / divisor


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
