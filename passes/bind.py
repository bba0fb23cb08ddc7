"""Replaces sharded parameters by one flat input for each unit, gathered and unpacked at first use.

Before: a placeholder for each parameter, and ``unshard_param(placeholder, ...)`` for each use. After: for each
unit, first among the placeholders and in the units' order, its flat shard [S] (and, if gradients accumulate, a
port [world_size * S]), and one ``unshard`` with the views that the graph reads. The parameters' own
placeholders are gone, so the graph has the same inputs on every rank.
"""

from __future__ import annotations

import operator

from torch import fx

from ..runtime.marker import unshard_param
from ..runtime.unshard import unshard
from ..torch_internals import mark_graph_input
from .context import CompileContext, GraphUnit, fail


def bind(gm: fx.GraphModule, context: CompileContext) -> None:
    placeholders = gm.graph.find_nodes(op="placeholder")
    flats = _insert_inputs(gm.graph, placeholders[0], context)
    full: dict[tuple[int, int], fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is not unshard_param:
            continue
        position = placeholders.index(node.args[0]) if node.args[0] in placeholders else -1
        if position not in context.params:
            fail(
                context,
                node,
                "unshard_param is called on something that is no sharded parameter of the graph",
            )
        param = context.params[position]
        key = (param.unit, param.view)
        if key not in full:
            full.update(_unshard_before(node, param.unit, context.units[param.unit], flats[param.unit]))
        _check_unwritten(node, param.name, context)
        full[key].meta.setdefault("example_value", node.meta.get("example_value"))
        node.replace_all_uses_with(full[key])
        gm.graph.erase_node(node)
    for position, param in context.params.items():
        if users := list(placeholders[position].users):
            fail(
                context,
                users[0],
                f"compiled code computes on the shards of parameter {param.name!r}. Inside compiled code read a "
                "parameter through its module; leave what works on shards (optimizer steps, clipping) outside",
            )
        gm.graph.erase_node(placeholders[position])


def _insert_inputs(graph: fx.Graph, first: fx.Node, context: CompileContext) -> list[tuple[fx.Node, fx.Node | None]]:
    flats: list[tuple[fx.Node, fx.Node | None]] = []
    with graph.inserting_before(first):
        for ordinal, unit in enumerate(context.units):
            shard = graph.placeholder(f"shard_{ordinal}")
            shard.meta["example_value"] = unit.shard
            mark_graph_input(shard, shard.name)
            port = None
            if unit.port is not None:
                port = graph.placeholder(f"port_{ordinal}")
                port.meta["example_value"] = unit.port
                mark_graph_input(port, port.name)
            flats.append((shard, port))
    return flats


def _unshard_before(
    node: fx.Node, ordinal: int, unit: GraphUnit, flat: tuple[fx.Node, fx.Node | None]
) -> dict[tuple[int, int], fx.Node]:
    """Gathers the unit before ``node``; returns a node for each of its views."""
    graph = node.graph
    with graph.inserting_before(node):
        gathered = graph.call_function(unshard, (*flat, unit.views, unit.comm))
        return {
            (ordinal, index): graph.call_function(operator.getitem, (gathered, index))
            for index in range(len(unit.views))
        }


def _check_unwritten(marker: fx.Node, name: str, context: CompileContext) -> None:
    """A gathered parameter is a copy: writing to it would be lost without a word."""
    for user in marker.users:
        target = user.target
        method = target if isinstance(target, str) else getattr(target, "__name__", "")
        in_place = method.endswith("_") and not method.endswith("__") and user.args[:1] == (marker,)
        if in_place or user.kwargs.get("out") is marker or (target is operator.setitem and user.args[0] is marker):
            fail(
                context,
                user,
                f"parameter {name!r} is written to inside forward. There it is a gathered copy, and the write "
                "would be lost: write to the sharded parameter outside forward, or use a buffer",
            )
