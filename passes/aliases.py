"""Which memory the nodes of a graph of aten operators read and write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from operator import getitem

import torch
from torch import fx
from torch._ops import OpOverload

_aten = torch.ops.aten
# Views at run time whose schema doesn't say so.
_UNDECLARED_VIEWS = (_aten._unsafe_view.default, _aten.reshape.default)


def is_view(node: fx.Node) -> bool:
    """Whether the node only gives another shape to memory it does not read."""
    return _viewed(node) is not None and not written_by(node)


def base_of(node: fx.Node, bases: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node that made the memory which ``node``'s result lies in; ``bases`` holds that of earlier nodes.

    A node that communication memory is marked at is a base, though it may be a view of a slot.
    """
    return node if "vescale" in node.meta else _allocation_of(node, bases)


def bases_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """:func:`base_of` for every node."""
    return _for_every_node(graph, base_of)


def allocations_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node, the one that its memory comes from: a slot, where it is part of one."""
    return _for_every_node(graph, _allocation_of)


def touches_of(graph: fx.Graph, bases: dict[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each piece of memory, the nodes that read or write it, in order; views don't."""
    touched: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if not is_view(node):
            for base in dict.fromkeys(bases[arg] for arg in node.all_input_nodes):
                touched.setdefault(base, []).append(node)
    return touched


def written_by(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node's operator writes to."""
    return [arg for arg, written in _aliasing_arguments(node) if written]


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument that the node's result is a view of, or is."""
    if node.target is getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    if node.target in _UNDECLARED_VIEWS:
        return node.all_input_nodes[0]
    if isinstance(node.target, OpOverload) and _returns_an_argument(node.target):
        return next((arg for arg, _ in _aliasing_arguments(node)), None)
    return None


def _allocation_of(node: fx.Node, found: dict[fx.Node, fx.Node]) -> fx.Node:
    aliased = _viewed(node)
    return found[aliased] if aliased is not None else node


def _for_every_node(
    graph: fx.Graph, find: Callable[[fx.Node, dict[fx.Node, fx.Node]], fx.Node]
) -> dict[fx.Node, fx.Node]:
    """What ``find`` makes of each node, given what it made of those before."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        found[node] = find(node, found)
    return found


def _aliasing_arguments(node: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """Arguments that the operator's schema marks as aliased, and whether it writes to them."""
    if not isinstance(node.target, OpOverload):
        return
    for position, name, written in _aliased(node.target):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, fx.Node):
                yield each, written


# Schemas are built anew whenever they are asked for, and passes ask of every node many times.
@functools.cache
def _returns_an_argument(target: OpOverload) -> bool:
    returns = target._schema.returns
    return bool(returns) and returns[0].alias_info is not None


@functools.cache
def _aliased(target: OpOverload) -> tuple[tuple[int, str, bool], ...]:
    """Arguments that the schema marks as aliased: position, name, and whether the operator writes to it."""
    return tuple(
        (position, argument.name, argument.alias_info.is_write)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None
    )
