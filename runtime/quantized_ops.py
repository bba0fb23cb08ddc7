"""The operators that stand for a unit's quantized communication in graphs, beside those of ``ops``.

In a joint graph ``vescale::all_gather_quantized`` and ``vescale::reduce_scatter_quantized`` take the places of
``vescale::all_gather`` and ``vescale::reduce_scatter``, and have a result of the same size and dtype.

In partitioned graphs ``vescale::start_all_gather_quantized`` quantizes the shard into its place in a packed buffer and
launches its gather, which ``vescale::wait_all_gather`` waits for; ``vescale::dequantize`` then fills the buffer that
parameters are read in. ``vescale::start_reduce_scatter_quantized`` quantizes the gradients, which may be overwritten as
soon as it returns, and sends each rank its part. What comes is averaged, over replicas too: on GPUs behind it on its
stream, on CPUs by ``vescale::wait_reduce_scatter_quantized``.

A graph is the same on all ranks, so it names the unit's packing, and where a rank's blocks lie is looked up at run
time. ``compiled`` says whether Inductor compiles the kernels.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Nothing, Pending, over_replicas, padding_is_read, start_all_to_all, start_gather_in_place
from .courses import Pairs, gather
from .groups import group_named
from .messages import tell_apart
from .ops import define, in_flight_on, launched, replicas_of
from .packing import StochasticQuantizer, packing_named
from .quantizing import average_into, dequantize_into, quantize_into
from .reductions import add_held, held_back, reductions_of
from .strips import Kernels


@torch.no_grad()
def _all_gather(shard: Tensor, unit: int, world_size: int, group: str, dtype: torch.dtype, packing: str) -> Tensor:
    """Gathers ``shard`` [S] of every rank, quantized, into [world_size * S] of ``dtype``."""
    ranks = group_named(group)
    tell_apart(ranks, unit)
    packed = shard.new_empty(packing_named(packing).nbytes, dtype=torch.uint8)
    full = shard.new_empty(shard.numel() * world_size, dtype=dtype)
    start_quantized_gather(shard, packed, ranks, packing, False).wait()
    _dequantize(packed, full, unit, packing, False)
    return full


def _start_gather(shard: Tensor, packed: Tensor, unit: int, group: str, packing: str, compiled: bool) -> None:
    def start(pairs: Pairs, group: str) -> Pending:
        (pair,) = pairs
        return start_quantized_gather(*pair, group_named(group), packing, compiled)

    launched(packed, gather([(shard, packed)], group, start))


@torch.no_grad()
def start_quantized_gather(
    shard: Tensor, packed: Tensor, group: dist.ProcessGroup, packing: str, compiled: bool
) -> Pending:
    """Quantizes ``shard`` [S] into this rank's place in ``packed``, and launches the gather of all ranks' places."""
    known = packing_named(packing)
    own = packed.narrow(0, group.rank() * known.part, known.part)
    quantize_into(known, group.rank(), shard, own, Kernels.on(shard.device, compiled))
    return start_gather_in_place(packed, group)


@torch.no_grad()
def _dequantize(packed: Tensor, full: Tensor, unit: int, packing: str, compiled: bool) -> None:
    dequantize_into(packing_named(packing), packed, full, Kernels.on(full.device, compiled))


@torch.no_grad()
def _reduce_scatter(full: Tensor, unit: int, group: str, replicas: str, packing: str, reductions: Tensor) -> Tensor:
    """Averages ``full`` [world_size * S], quantized by each rank, and returns this rank's [S]."""
    ranks = group_named(group)
    tell_apart(ranks, unit)
    shard = full.new_empty(full.numel() // ranks.size())
    if held_back(full, shard, reductions):
        return shard
    sent, received = (full.new_empty(packing_named(packing).nbytes, dtype=torch.uint8) for _ in range(2))
    add_held(full, reductions)
    _start_quantized_reduction(full, shard, sent, received, group, replicas, packing, reductions, False).wait()
    return shard


def _start_reduce(
    full: Tensor,
    shard: Tensor,
    sent: Tensor,
    received: Tensor,
    unit: int,
    group: str,
    replicas: str,
    packing: str,
    reductions: Tensor,
    compiled: bool,
) -> None:
    if held_back(full, shard, reductions):
        launched(received, Nothing())
        return
    add_held(full, reductions)
    launched(
        received,
        _start_quantized_reduction(full, shard, sent, received, group, replicas, packing, reductions, compiled),
    )


def _wait_reduce(shard: Tensor, sent: Tensor, received: Tensor, unit: int) -> None:
    in_flight_on(received).wait()


@torch.no_grad()
def _start_quantized_reduction(
    full: Tensor,
    shard: Tensor,
    sent: Tensor,
    received: Tensor,
    group: str,
    replicas: str,
    packing: str,
    reductions: Tensor,
    compiled: bool,
) -> Pending:
    """Holds all that is needed to the end, whatever becomes of the unit meanwhile."""
    ranks, known, kernels = group_named(group), packing_named(packing), Kernels.on(full.device, compiled)
    key = reductions_of(reductions).rounding.next_key(cast(StochasticQuantizer, known.quantizer).seed or 0)
    quantize_into(known, None, full, sent, kernels, key)
    if padding_is_read():  # nothing else writes it
        shard.zero_()

    @torch.no_grad()
    def average() -> None:
        own = sent.narrow(0, ranks.rank() * known.part, known.part)
        average_into(known, ranks.rank(), own, received, shard, kernels)

    return over_replicas(start_all_to_all(sent, received, ranks, average), [shard], replicas_of(replicas))


def _all_gather_fake(shard: Tensor, unit: int, world_size: int, group: str, dtype: torch.dtype, packing: str) -> Tensor:
    return shard.new_empty(shard.numel() * world_size, dtype=dtype)


def _reduce_scatter_fake(
    full: Tensor, unit: int, group: str, replicas: str, packing: str, reductions: Tensor
) -> Tensor:
    return full.new_empty(full.numel() // group_named(group).size())


define(
    "all_gather_quantized(Tensor shard, int unit, int world_size, str group, ScalarType dtype, str packing) -> Tensor",
    _all_gather,
    _all_gather_fake,
)
define(
    "reduce_scatter_quantized(Tensor full, int unit, str group, str replicas, str packing, Tensor reductions) "
    "-> Tensor",
    _reduce_scatter,
    _reduce_scatter_fake,
)
define(
    "start_all_gather_quantized(Tensor shard, Tensor(a!) packed, int unit, str group, str packing, bool compiled) "
    "-> ()",
    _start_gather,
)
define("dequantize(Tensor packed, Tensor(a!) full, int unit, str packing, bool compiled) -> ()", _dequantize)
define(
    "start_reduce_scatter_quantized(Tensor(a!) full, Tensor(b!) shard, Tensor(c!) sent, Tensor(d!) received, int unit, "
    "str group, str replicas, str packing, Tensor reductions, bool compiled) -> ()",
    _start_reduce,
)
define(
    "wait_reduce_scatter_quantized(Tensor(a!) shard, Tensor(b!) sent, Tensor(c!) received, int unit) -> ()",
    _wait_reduce,
)

all_gather_quantized = torch.ops.vescale.all_gather_quantized.default
reduce_scatter_quantized = torch.ops.vescale.reduce_scatter_quantized.default
start_all_gather_quantized = torch.ops.vescale.start_all_gather_quantized.default
dequantize = torch.ops.vescale.dequantize.default
start_reduce_scatter_quantized = torch.ops.vescale.start_reduce_scatter_quantized.default
wait_reduce_scatter_quantized = torch.ops.vescale.wait_reduce_scatter_quantized.default
