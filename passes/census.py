"""Counts, from a final graph, the bytes of every collective, copy, cast, concatenation and communication buffer.

What a collective moves is the whole unsharded buffer: a gather brings every rank's part to its place there, this
rank's own included, and a reduction takes every rank's part from there. Where ranks exchange messages, no library
brings a rank's own part to its place: that copy-in is counted besides. An average over replicas moves the shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from ..cost.collectives import ALL_GATHER
from ..cost.compute import stays_in_registers
from ..runtime import crossing, leaving, quantized_ops
from ..schemas import is_pointwise
from .aliases import bases_of
from .context import (
    CompileContext,
    Copied,
    GraphUnit,
    Lowering,
    Role,
    Use,
    buffer_of,
    comm_of,
    is_allocation,
    marked_buffer,
)
from .edit import nbytes_of, value_of
from .moves import MOVES, buffer_behind
from .summary import Direction, Entry, Kind

_aten = torch.ops.aten
_TO_SHARD = "to the shard's dtype"
_QUANTIZED = frozenset(
    {
        quantized_ops.start_all_gather_quantized,
        crossing.take_all_gather_quantized,
        quantized_ops.dequantize,
        quantized_ops.start_reduce_scatter_quantized,
        quantized_ops.wait_reduce_scatter_quantized,
        leaving.leave_reduce_scatter_quantized,
    }
)


def census(graph: fx.Graph, context: CompileContext) -> list[Entry]:
    """Everything that a final graph moves or holds for the communication of parameters and gradients."""
    bases = bases_of(graph)
    return [entry for node in graph.nodes for entry in _entries(node, bases, context)]


def _entries(node: fx.Node, bases: dict[fx.Node, fx.Node], context: CompileContext) -> Iterator[Entry]:
    comm = comm_of(node)
    if node.target in _QUANTIZED:
        yield from _quantized(node, context)
    elif comm is not None and comm.role in (Role.LAUNCH, Role.TAKE):
        yield from _collective(node, comm.kind == ALL_GATHER, context.units[comm.unit])
    buffer = buffer_of(node)
    if buffer is not None and is_allocation(node):
        direction = Direction.GATHER if buffer.use in (Use.PARAMETERS, Use.PACKED) else Direction.REDUCE
        yield Entry(Kind.BUFFER, direction, context.units[buffer.unit].name, nbytes_of(node), buffer.use.value)
    mark = node.meta.get("vescale")
    if isinstance(mark, Copied):
        unit = context.units[mark.unit].name
        yield Entry(_copy_or_cast(node.args[1], node), Direction.REDUCE, unit, nbytes_of(node), mark.why)
    if node.target is leaving.cast_when_read:
        result = node.all_input_nodes[1]
        unit = context.units[marked_buffer(result).unit].name
        yield Entry(Kind.CAST, Direction.REDUCE, unit, nbytes_of(result), _TO_SHARD)
    elif comm is None and node.target not in _QUANTIZED:
        yield from _movements(node, bases, context)


def _collective(node: fx.Node, gathers: bool, unit: GraphUnit) -> Iterator[Entry]:
    if not gathers:
        full_node, reduced = node.all_input_nodes[:2]
        yield Entry(Kind.REDUCE_SCATTER, Direction.REDUCE, unit.name, nbytes_of(full_node), "gradients")
        yield from _over_replicas(reduced, unit)
        return
    shard, full = (value_of(arg) for arg in node.all_input_nodes[:2])
    assert shard is not None and full is not None
    yield Entry(Kind.ALL_GATHER, Direction.GATHER, unit.name, full.numel() * full.itemsize, "parameters")
    casts = shard.dtype != full.dtype
    if casts or unit.comm.exchanges:
        kind, nbytes = Kind.CAST if casts else Kind.COPY_IN, shard.numel() * full.itemsize
        yield Entry(kind, Direction.GATHER, unit.name, nbytes, "the shard, into its place in the gathered buffer")


def _over_replicas(reduced: fx.Node, unit: GraphUnit) -> Iterator[Entry]:
    if unit.comm.replicas:
        yield Entry(Kind.ALL_REDUCE, Direction.REDUCE, unit.name, nbytes_of(reduced), "the average over replicas")


def _quantized(node: fx.Node, context: CompileContext) -> Iterator[Entry]:
    """Codes and scales on the wire; a quantization as what it writes of them, a dequantization as what it writes."""
    nbytes = [nbytes_of(arg) for arg in node.all_input_nodes]
    mark = comm_of(node) or marked_buffer(node.all_input_nodes[1])  # a dequantization is no collective
    unit = context.units[mark.unit]
    match node.target:
        case quantized_ops.start_all_gather_quantized | crossing.take_all_gather_quantized:
            own = nbytes[1] // unit.comm.world_size
            yield Entry(Kind.ALL_GATHER, Direction.GATHER, unit.name, nbytes[1], "codes and scales of parameters")
            yield Entry(Kind.CAST, Direction.GATHER, unit.name, own, "the shard, quantized into its place")
        case quantized_ops.dequantize:
            yield Entry(Kind.CAST, Direction.GATHER, unit.name, nbytes[1], "dequantized to where parameters are read")
        case quantized_ops.start_reduce_scatter_quantized:
            yield Entry(Kind.REDUCE_SCATTER, Direction.REDUCE, unit.name, nbytes[2], "codes and scales of gradients")
            yield Entry(Kind.CAST, Direction.REDUCE, unit.name, nbytes[2], "quantized to what is sent")
            yield from _over_replicas(node.all_input_nodes[1], unit)
        case quantized_ops.wait_reduce_scatter_quantized | leaving.leave_reduce_scatter_quantized:
            yield Entry(Kind.CAST, Direction.REDUCE, unit.name, nbytes[0], "dequantized and averaged")


def _movements(node: fx.Node, bases: dict[fx.Node, fx.Node], context: CompileContext) -> Iterator[Entry]:
    """Values of communication buffers that are written elsewhere as they are."""
    kind = MOVES.get(cast(OpOverload, node.target))
    if kind is Kind.CAST and context.lowering is Lowering.INDUCTOR and stays_in_registers(node):
        return
    for source in node.all_input_nodes:
        buffer = buffer_behind(bases[source], context)
        promoted = kind is None and context.lowering is Lowering.EAGER and _promotes(node, source)
        if buffer is None or not (kind or promoted):
            continue
        gathers = buffer.use is Use.PARAMETERS
        why = "by the program itself" if gathers else _TO_SHARD
        why = f"to the dtype of {node.target}" if promoted else why
        direction = Direction.GATHER if gathers else Direction.REDUCE
        yield Entry(kind or Kind.CAST, direction, context.units[buffer.unit].name, _moved_bytes(source, node), why)


def _promotes(node: fx.Node, source: fx.Node) -> bool:
    """Whether an operator that computes in another dtype than an operand's casts that first, to memory, as PyTorch's do
    on CPUs. Generated kernels, and those of GPUs, do it on the way."""
    operand, result = value_of(source), value_of(node)
    return (
        operand is not None
        and result is not None
        and is_pointwise(node.target)
        and operand.device.type == "cpu"
        and operand.dtype.is_floating_point
        and result.dtype.is_floating_point
        and operand.dtype != result.dtype
    )


def _moved_bytes(source: fx.Node, node: fx.Node) -> int:
    """Of a source, in the result's dtype. What it is joined with, or padded by, comes from elsewhere."""
    operand, result = source.meta["val"], node.meta["val"]
    return min(nbytes_of(source) // operand.itemsize * result.itemsize, nbytes_of(node))


def _copy_or_cast(source: fx.node.Argument, copy: fx.Node) -> Kind:
    assert isinstance(source, fx.Node)
    return Kind.COPY if source.meta["val"].dtype == copy.meta["val"].dtype else Kind.CAST
