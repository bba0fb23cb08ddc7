"""Proves, on each final graph, what must hold before it runs. Raises GraphError at the first breach.

1. A gathered buffer is read only after its wait, and nothing is written to it; nothing is written to a
   gradient buffer once its reduce-scatter is launched.
2. A collective has one launch and one wait. In a forward, a unit that is resharded is released: no output
   keeps its gathered buffer alive. A unit is gathered at most once in each graph, and its gradient is reduced
   in the backward exactly as often as the joint graph reduced it: once.
3. The order, sizes and dtypes of the collectives are recorded, for the comparison across ranks.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from .context import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Comm,
    CompileContext,
    Part,
    Role,
    comm_of,
    fail,
)

_COLLECTIVES = torch.ops._c10d_functional


def verify(gm: fx.GraphModule, context: CompileContext) -> None:
    part = context.part
    assert part is not None
    launches = _check_pairs(gm.graph, context)
    _check_writes(gm.graph, context)
    _check_counts(launches, part, context)
    if part is Part.FORWARD:
        _check_released(gm.graph, context)
    context.collectives[part] = [_line(node, comm) for node, comm in launches]


def _check_pairs(graph: fx.Graph, context: CompileContext) -> list[tuple[fx.Node, Comm]]:
    """Every collective of ours is a launch read by one wait, of the same unit and kind."""
    launches = []
    for node in graph.nodes:
        comm = comm_of(node)
        if comm is None:
            if any((c := comm_of(arg)) and c.role is Role.LAUNCH for arg in node.all_input_nodes):
                fail(context, node, "a collective's result is read before its wait")
        elif comm.role is Role.LAUNCH:
            waits = [user for user in node.users if comm_of(user) == Comm(comm.kind, Role.WAIT, comm.unit)]
            if len(waits) != 1:
                name = context.units[comm.unit].name
                fail(context, node, f"{comm.kind} of unit {name} has {len(waits)} waits; it must have one")
            launches.append((node, comm))
        elif not any((c := comm_of(arg)) and c.role is Role.LAUNCH for arg in node.all_input_nodes):
            fail(context, node, "a wait for no launch")
    return launches


def _check_writes(graph: fx.Graph, context: CompileContext) -> None:
    """Nothing is written to a gathered buffer, nor to a gradient buffer in flight or reduced."""
    bases: dict[fx.Node, fx.Node] = {}  # a view → the node whose memory it is
    guarded: dict[fx.Node, str] = {}  # memory → why it must not be written
    for node in graph.nodes:
        bases[node] = _base(node, bases)
        for written in _written(node):
            if reason := guarded.get(bases[written]):
                fail(context, node, f"writes to {reason}")
        comm = comm_of(node)
        if comm is None or comm.role is not Role.LAUNCH:
            continue
        name = context.units[comm.unit].name
        if comm.kind == ALL_GATHER:
            guarded[node] = f"the gathered parameters of unit {name}"
        else:
            guarded[bases[node.all_input_nodes[0]]] = (
                f"the gradient buffer of unit {name}, whose reduction was launched before"
            )


def _check_counts(launches: list[tuple[fx.Node, Comm]], part: Part, context: CompileContext) -> None:
    counts = Counter((comm.kind, comm.unit) for _, comm in launches)
    for ordinal, unit in enumerate(context.units):
        gathers = counts[ALL_GATHER, ordinal]
        if gathers > 1:
            fail(context, None, f"{part.value}: unit {unit.name} is gathered {gathers} times; at most once")
        reductions = counts[REDUCE_SCATTER, ordinal]
        wanted = context.reduced_units.count(ordinal) if part is Part.BACKWARD else 0
        if reductions != wanted or wanted > 1:
            fail(
                context,
                None,
                f"{part.value}: the gradient of unit {unit.name} is reduced {reductions} times, "
                f"{'once' if wanted else 'never'} is right",
            )


def _check_released(graph: fx.Graph, context: CompileContext) -> None:
    """Nothing kept for the backward is memory that a resharded unit was gathered into."""
    bases: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        bases[node] = _base(node, bases)
        if node.op != "output":
            continue
        outputs = node.args[0]
        assert isinstance(outputs, list | tuple)
        for kept in outputs[context.results :]:
            comm = comm_of(bases[kept]) if isinstance(kept, fx.Node) else None
            if comm and comm.kind == ALL_GATHER and context.units[comm.unit].reshard_after_forward:
                name = context.units[comm.unit].name
                fail(context, kept, f"unit {name} is resharded after forward, but its parameters are kept")


def _base(node: fx.Node, bases: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node that made the memory which ``node``'s result lies in."""
    target = node.target
    if comm_of(node) is not None and node.all_input_nodes:
        comm = comm_of(node)
        assert comm is not None
        return bases[node.all_input_nodes[0]] if comm.role is Role.WAIT else node
    if isinstance(target, torch._ops.OpOverload) and node.all_input_nodes:
        returns = target._schema.returns
        if returns and returns[0].alias_info is not None:
            for schema_arg, arg in zip(target._schema.arguments, node.args, strict=False):
                if schema_arg.alias_info is not None and isinstance(arg, fx.Node):
                    return bases[arg]
    return node


def _written(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node's operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written: list[fx.Node] = []
    for position, schema_arg in enumerate(node.target._schema.arguments):
        if schema_arg.alias_info is None or not schema_arg.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(schema_arg.name)
        values = value if isinstance(value, list | tuple) else [value]
        written.extend(each for each in values if isinstance(each, fx.Node))
    return written


def _line(node: fx.Node, comm: Comm) -> str:
    value = node.meta["val"]
    return f"{comm.kind} of unit {comm.unit}: {value.numel()} elements of {value.dtype}"
