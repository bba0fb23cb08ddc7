"""Replaces sharded parameters by one flat input for each unit, gathered and unpacked at first use.

Before: a placeholder for each parameter, and ``unshard_param(placeholder, ...)`` for each use. After: for each
unit, first among the placeholders and in the units' order, its flat shard [S] (and, if gradients accumulate or are
quantized, the handle of its reductions), and one ``unshard`` with the views that the graph reads. The parameters' own
placeholders are gone, so the graph has the same inputs on every rank.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, fx

from ..runtime.marker import unshard_param
from ..runtime.unshard import unshard
from ..torch_internals.tracing import mark_graph_input
from .context import ON_SHARDS, CompileContext, GraphUnit, ParamInput, fail
from .streams import check_streams
from .strided import check_strided
from .unwritten import check_unwritten

_Inputs = tuple[fx.Node | None, ...]  # of a unit, as GraphUnit.inputs has them


def bind(gm: fx.GraphModule, context: CompileContext) -> None:
    placeholders = gm.graph.find_nodes(op="placeholder")
    flats = _insert_inputs(gm.graph, placeholders[0], context)
    outside = _outside_regions(gm.graph)
    full: dict[tuple[int, int], fx.Node] = {}
    positions = {placeholder: position for position, placeholder in enumerate(placeholders)}
    markers = {node: _param_of(node, positions, context) for node in gm.graph.nodes if node.target is unshard_param}
    names = {node: param.name for node, param in markers.items()}
    check_unwritten(gm, names, context)
    check_strided(gm, names, context)
    check_streams(gm, context)
    for node, param in markers.items():
        key = (param.unit, param.view)
        if key not in full:
            place = outside.get(node, node)
            full.update(_unshard_before(place, node, param.unit, context.units[param.unit], flats[param.unit]))
        full[key].meta.setdefault("example_value", node.meta.get("example_value"))
        node.replace_all_uses_with(full[key])
        gm.graph.erase_node(node)
    for position, param in context.params.items():
        if users := list(placeholders[position].users):
            fail(
                context,
                users[0],
                f"compiled code computes on the shards of parameter {param.name!r}. {ON_SHARDS}",
            )
        gm.graph.erase_node(placeholders[position])


def _param_of(marker: fx.Node, positions: Mapping[fx.Node, int], context: CompileContext) -> ParamInput:
    position = positions.get(cast(fx.Node, marker.args[0]), -1)
    if position not in context.params:
        fail(context, marker, "unshard_param is called on something that is no sharded parameter of the graph")
    return context.params[position]


def _insert_inputs(graph: fx.Graph, first: fx.Node, context: CompileContext) -> list[_Inputs]:
    with graph.inserting_before(first):
        return [
            tuple(_insert_input(graph, f"{name}_{ordinal}", example) for name, example in unit.inputs)
            for ordinal, unit in enumerate(context.units)
        ]


def _insert_input(graph: fx.Graph, name: str, example: Tensor | None) -> fx.Node | None:
    if example is None:
        return None
    placeholder = graph.placeholder(name)
    placeholder.meta["example_value"] = example
    mark_graph_input(placeholder, placeholder.name)
    return placeholder


def _outside_regions(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node inside regions (no_grad, autocast, vmap, ...), the node that opens the outermost of them.

    What a unit's first use happens to be in must not become part of its gather: other uses want gradients.
    """
    found: dict[fx.Node, fx.Node] = {}
    opened: list[fx.Node] = []
    for node in graph.nodes:
        if opened:
            found[node] = opened[0]
        name = getattr(node.target, "__name__", "")
        opens = name.startswith("_enter_") or name.endswith("increment_nesting")
        closes = name.startswith("_exit_") or name.endswith("decrement_nesting")
        if node.target is torch._C._set_grad_enabled:
            # Set at the start of a region to one value, and back at its end.
            opens, closes = _toggles(node, opened)
        if opens:
            opened.append(node)
        elif closes and opened:
            opened.pop()
    return found


def _toggles(node: fx.Node, opened: list[fx.Node]) -> tuple[bool, bool]:
    enclosing = [each for each in opened if each.target is node.target]
    returns = bool(enclosing) and enclosing[-1].args[0] != node.args[0]
    return not returns, returns


def _unshard_before(
    node: fx.Node, marker: fx.Node, ordinal: int, unit: GraphUnit, inputs: _Inputs
) -> dict[tuple[int, int], fx.Node]:
    """Gathers the unit before ``node``, with the program's annotations of its first use; returns a node for each of its
    views."""
    graph = node.graph
    turned_on = unit.shard.requires_grad and not torch.is_grad_enabled()  # by the program, in a region after this place
    with graph.inserting_before(node), _grad_enabled(graph, turned_on):
        gathered = graph.call_function(unshard, (*inputs, unit.views, unit.comm, unit.others))
        views = [graph.call_function(operator.getitem, (gathered, index)) for index in range(len(unit.views))]
    for each in (gathered, *views) if marker.meta.get("custom") else ():
        each.meta["custom"] = dict(marker.meta["custom"])
    return {(ordinal, index): view for index, view in enumerate(views)}


@contextlib.contextmanager
def _grad_enabled(graph: fx.Graph, turned_on: bool) -> Iterator[None]:
    if turned_on:
        graph.call_function(torch._C._set_grad_enabled, (True,))
    yield
    if turned_on:
        graph.call_function(torch._C._set_grad_enabled, (False,))
