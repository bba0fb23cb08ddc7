"""Operators that write a value elsewhere as it is, and the gathered parameters that a graph moves by them."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from .context import Buffer, CompileContext, Part, Use, buffer_of
from .reshard import GATHERS
from .summary import Kind

_aten = torch.ops.aten
CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
MOVES: dict[OpOverload, Kind] = {
    _aten.clone.default: Kind.COPY,
    _aten.constant_pad_nd.default: Kind.COPY,
    _aten.cat.default: Kind.CONCATENATION,
} | dict.fromkeys(CASTS, Kind.CAST)

# Others of which gradients come out: by name, in whatever overload.
_OF_GRADIENTS = frozenset({"slice_scatter", "select_scatter", "index", "index_select", "gather", "flip", "rev"})


def uncast(node: fx.Node) -> fx.Node:
    """What a node is a cast of, or the node itself."""
    while node.target in CASTS:
        node = node.all_input_nodes[0]
    return node


def moves(node: fx.Node) -> bool:
    """Whether a node's result is values of its operands as they are, laid out otherwise."""
    if not isinstance(node.target, OpOverload) or node.target in CASTS:
        return False
    return node.target in MOVES or node.target.overloadpacket.__name__ in _OF_GRADIENTS


def moved_parameters(
    graph: fx.Graph, bases: dict[fx.Node, fx.Node], context: CompileContext
) -> Counter[tuple[int, str]]:
    """How often each unit's gathered parameters are moved, by which operator: before and after :func:`expand`."""
    return Counter(
        (unit, str(node.target))
        for node in graph.nodes
        if node.target in MOVES
        for source in node.all_input_nodes
        if (unit := _gathered_from(bases[source], context)) is not None
    )


def _gathered_from(base: fx.Node, context: CompileContext) -> int | None:
    """The unit whose gathered parameters lie in memory."""
    if base.target in GATHERS:
        return cast(int, base.args[1])
    buffer = buffer_behind(base, context)
    return buffer.unit if buffer is not None and buffer.use is Use.PARAMETERS else None


def buffer_behind(base: fx.Node, context: CompileContext) -> Buffer | None:
    """What communication memory is for; parameters that the forward has kept for the backward are among it."""
    if base.op == "placeholder" and context.part is Part.BACKWARD and base.name in context.saved:
        return Buffer(Use.PARAMETERS, context.saved[base.name])
    return buffer_of(base)
