"""Compiled kernels on strips: tables of blocks side by side, of a unit's elements and of their packed form."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # documented, not in __all__

from ..torch_internals.autograd import below_autograd
from ..torch_internals.inductor import rounds_as_operators
from .block_arithmetic import decoded, encoded, uniform_at
from .block_places import Strips, strips_of
from .packing import Packing, Quantizer
from .rounding import Key

_MOST_KERNELS = 256  # quantizers times dtypes times devices, before compiling fails; by default it would be 8


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


def run_on_strips(
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
    flats, stored = _as_own_memory(flats), _as_own_memory(stored)
    if in_lines:
        flats = [_lines(flat, strips.tile[1]) for flat in flats]
    for tensor, dim in ((strips.table, 1), *((flat, 0) for flat in (*flats, *stored))):
        if tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
    with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS), below_autograd():
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


def _as_own_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory as if each tensor were alone in its own.

    Compiled code would not write to two views of one storage in one kernel, and is compiled again for a view that
    begins elsewhere.
    """
    # With their GPU as the current one, as exporting memory may ask for; on a CPU nothing happens.
    with torch.cuda.device_of(tensors[0]):
        # By capsules: a tensor's own __dlpack__ takes six times as long, for streams and copies that there are not.
        return [from_dlpack(to_dlpack(tensor)) for tensor in tensors]


def _lines(flat: Tensor, w: int) -> Tensor:
    """View of all lines of ``w`` elements, from wherever they begin: what a line is read from by its first element."""
    return flat.as_strided((flat.numel() - w + 1, w), (1, 1))


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


def quantize_strips(
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
    uniform = None if key is None else uniform_at(at.elements, key)
    codes, scales = encoded(quantizer, _read(source, at.elements), uniform)
    _write(packed, at.codes, codes)
    _write(stored, at.scales, scales)


def dequantize_strips(
    quantizer: Quantizer,
    tile: tuple[int, int],
    blocks: int,
    strips: Tensor,
    packed: Tensor,
    full: Tensor,
    stored: Tensor,
) -> None:
    at = _Places.of(strips, tile, blocks)
    _write(full, at.elements, decoded(quantizer, _read(packed, at.codes), _read(stored, at.scales)))


def average_strips(
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
        decoded(quantizer, _read(codes, at.codes), _read(stored, at.scales))
        for codes, stored in zip(parts[:ranks], parts[ranks:], strict=True)
    ]
    _write(shard, at.elements, functools.reduce(torch.add, terms) / divisor)


def average_strips_of_many(
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
    terms = decoded(quantizer, codes, _read(received_scales, at.scales + begin))
    own_term = decoded(quantizer, _read(own, at.codes), _read(own_scales, at.scales))
    _write(shard, at.elements, torch.where(each == rank, own_term, terms).sum(0) / divisor)
