"""Replaces each collective by a buffer, a launch into it or out of it, and a wait.

An all-gather becomes memory for the unsharded parameters, which everything that read its result now reads; a
reduce-scatter becomes memory for this rank's part, and for what the reduction needs besides. A gather takes the
shard in its own dtype: the cast to the buffer's, if there is one, is the collective's, into this rank's place there.

A carried unit's gather for the backward is launched at the end of the forward, and taken over in the backward; that of
a quantized unit with its codes and scales, which are dequantized there.

A gather of quantized parameters goes into a buffer of codes and scales, its launch quantizes the shard, and what read
its result reads memory that one more node fills: it dequantizes the whole unit, where it is first needed. A reduction
of quantized gradients has two such buffers, for what this rank sends and for what it receives, as its scratch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from ..cost.collectives import ALL_GATHER, REDUCE_SCATTER
from ..runtime import crossing, ops, quantized_ops
from .aliases import bases_of
from .context import Buffer, Comm, CompileContext, Lowering, Part, Role, Use
from .edit import allocate, call
from .moves import CASTS, moved_parameters, uncast
from .reshard import GATHERS, REDUCTIONS


def expand(gm: fx.GraphModule, context: CompileContext) -> None:
    _put_inputs_first(gm.graph)
    context.moved = moved_parameters(gm.graph, bases_of(gm.graph), context)
    context.sources = {node.args[1]: uncast(node.args[0]).name for node in gm.graph.nodes if node.target in GATHERS}
    context.returned = _returned(gm.graph)
    for node in list(gm.graph.nodes):
        if node.target is ops.all_gather:
            _expand_gather(node, context)
        elif node.target is ops.reduce_scatter:
            _expand_reduction(node, context)
        elif node.target is quantized_ops.all_gather_quantized:
            _expand_quantized_gather(node, context)
        elif node.target is quantized_ops.reduce_scatter_quantized:
            _expand_quantized_reduction(node, context)


def _put_inputs_first(graph: fx.Graph) -> None:
    """AOTAutograd makes the token that orders operators with effects before the inputs, where no launch may go."""
    last = graph.find_nodes(op="placeholder")[-1]
    before = itertools.takewhile(lambda node: node is not last, graph.nodes)
    for node in reversed([each for each in before if each.op != "placeholder"]):
        last.append(node)


def _returned(graph: fx.Graph) -> dict[int, int]:
    """The units whose reduced gradients are outputs, by their places."""
    outputs: tuple[Any, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    results = ((index, uncast(value)) for index, value in enumerate(outputs) if isinstance(value, fx.Node))
    return {index: cast(int, value.args[1]) for index, value in results if value.target in REDUCTIONS}


@dataclass(frozen=True)
class _Gather:
    """The operators of a gather: launched and waited for in one graph, or carried from the forward to the backward."""

    start: OpOverload
    carry: OpOverload
    take: OpOverload


_PLAIN = _Gather(ops.start_all_gather, crossing.carry_all_gather, crossing.take_all_gather)
_QUANTIZED = _Gather(
    quantized_ops.start_all_gather_quantized,
    crossing.carry_all_gather_quantized,
    crossing.take_all_gather_quantized,
)


def _expand_gather(node: fx.Node, context: CompileContext) -> None:
    value = node.meta["val"]
    args: tuple[Any, ...] = node.args
    source, unit, _, group = args
    shard = source.args[0] if source.target in CASTS else source
    buffer = Buffer(Use.PARAMETERS, unit)
    full = _gathered(node, _PLAIN, (shard, unit, group), value.numel(), value.dtype, buffer, context)
    node.replace_all_uses_with(full)
    node.graph.erase_node(node)
    if shard is not source and not source.users:
        node.graph.erase_node(source)


def _gathered(
    node: fx.Node,
    operators: _Gather,
    args: tuple[Any, ...],
    numel: int,
    dtype: torch.dtype,
    buffer: Buffer,
    context: CompileContext,
) -> fx.Node:
    """Inserts a gather in front of ``node``; returns the memory that it fills."""
    graph, value = node.graph, node.meta["val"]
    shard, unit, group, *rest = args
    carried = unit in context.carried
    over = replace(buffer, carried=group)

    def insert(operator: OpOverload, role: Role, buffer: Buffer) -> fx.Node:
        memory = allocate(graph, numel, like=value, dtype=dtype, mark=buffer)
        call(graph, operator, shard, memory, unit, group, *rest, mark=Comm(ALL_GATHER, role, unit))
        return memory

    with graph.inserting_before(node):
        if carried and context.part is Part.BACKWARD:
            memory = insert(operators.take, Role.TAKE, over)
        else:
            memory = insert(operators.start, Role.LAUNCH, buffer)
            call(graph, ops.wait_all_gather, memory, unit, mark=Comm(ALL_GATHER, Role.WAIT, unit))
    if carried and context.part is Part.FORWARD:
        with graph.inserting_before(graph.output_node()):
            insert(operators.carry, Role.CARRY, over)
    return memory


def _expand_reduction(node: fx.Node, context: CompileContext) -> None:
    graph, value = node.graph, node.meta["val"]
    args: tuple[Any, ...] = node.args
    full, unit, group, replicas, reductions = args
    accumulates = (reductions,) if reductions is not None else ()
    with graph.inserting_before(node):
        shard = allocate(graph, value.numel(), like=value, mark=Buffer(Use.REDUCED, unit))
        needed = context.units[unit].comm.reduce_scratch
        scratch = allocate(graph, needed, like=value, mark=Buffer(Use.SCRATCH, unit))
        launch, wait = (Comm(REDUCE_SCATTER, role, unit) for role in (Role.LAUNCH, Role.WAIT))
        call(graph, ops.start_reduce_scatter, full, shard, scratch, unit, group, replicas, *accumulates, mark=launch)
        call(graph, ops.wait_reduce_scatter, full, shard, scratch, unit, mark=wait)
    node.replace_all_uses_with(shard)
    graph.erase_node(node)


def _expand_quantized_gather(node: fx.Node, context: CompileContext) -> None:
    graph, value = node.graph, node.meta["val"]
    args: tuple[Any, ...] = node.args
    shard, unit, _, group, _, packing = args
    compiled = context.lowering is Lowering.INDUCTOR
    nbytes, buffer = context.units[unit].comm.packed_bytes, Buffer(Use.PACKED, unit)
    packed = _gathered(node, _QUANTIZED, (shard, unit, group, packing, compiled), nbytes, torch.uint8, buffer, context)
    with graph.inserting_before(node):
        full = allocate(graph, value.numel(), like=value, mark=Buffer(Use.PARAMETERS, unit))
        call(graph, quantized_ops.dequantize, packed, full, unit, packing, compiled)
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def _expand_quantized_reduction(node: fx.Node, context: CompileContext) -> None:
    graph, value = node.graph, node.meta["val"]
    args: tuple[Any, ...] = node.args
    full, unit, group, replicas, packing, reductions = args
    compiled = context.lowering is Lowering.INDUCTOR
    launch, wait = (Comm(REDUCE_SCATTER, role, unit) for role in (Role.LAUNCH, Role.WAIT))
    nbytes = context.units[unit].comm.packed_gradient_bytes
    start, finish = quantized_ops.start_reduce_scatter_quantized, quantized_ops.wait_reduce_scatter_quantized
    with graph.inserting_before(node):
        shard = allocate(graph, value.numel(), like=value, mark=Buffer(Use.REDUCED, unit))
        sent, received = (
            allocate(graph, nbytes, like=value, dtype=torch.uint8, mark=Buffer(Use.SCRATCH, unit)) for _ in range(2)
        )
        where = (unit, group, replicas, packing, reductions, compiled)
        call(graph, start, full, shard, sent, received, *where, mark=launch)
        call(graph, finish, shard, sent, received, unit, mark=wait)
    node.replace_all_uses_with(shard)
    graph.erase_node(node)
