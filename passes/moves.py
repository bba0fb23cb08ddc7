"""Operators that write a value elsewhere as it is, and the gathered parameters that a graph moves by them."""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from .aliases import bases_of
from .context import CompileContext, Part, Use, buffer_of
from .reshard import GATHERS
from .summary import Kind

_aten = torch.ops.aten
CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
PAD = _aten.constant_pad_nd.default  # as Inductor pads operands of products whose kernels like other shapes
MOVES: dict[OpOverload, Kind] = {
    _aten.clone.default: Kind.COPY,
    PAD: Kind.COPY,
    _aten.cat.default: Kind.CONCATENATION,
} | dict.fromkeys(CASTS, Kind.CAST)


def moved_parameters(graph: fx.Graph, context: CompileContext) -> Counter[tuple[int, str]]:
    """How often each unit's gathered parameters are moved, by which operator: before and after :func:`expand`."""
    bases = bases_of(graph)
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
    if base.op == "placeholder" and context.part is Part.BACKWARD:
        return context.saved.get(base.name)
    buffer = buffer_of(base)
    return buffer.unit if buffer is not None and buffer.use is Use.PARAMETERS else None
