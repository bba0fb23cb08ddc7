"""Which memory the nodes of a graph of aten operators read and write."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..schemas import is_view, viewed


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
    """For each piece of memory, the nodes that read or write it, in order."""
    touched: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for base in touched_by(node, bases):
            touched.setdefault(base, []).append(node)
    return touched


def touched_by(node: fx.Node, bases: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """The pieces of memory that a node reads or writes; a view none. What a collective of the program's own sends is
    read until that is waited for."""
    if is_view(node):
        return []
    arguments = node.all_input_nodes
    if node.target is torch.ops._c10d_functional.wait_tensor.default:
        arguments = [*arguments, *bases[arguments[0]].all_input_nodes]
    return list(dict.fromkeys(bases[argument] for argument in arguments))


def _allocation_of(node: fx.Node, found: dict[fx.Node, fx.Node]) -> fx.Node:
    aliased = viewed(node)
    return found[aliased] if aliased is not None else node


def _for_every_node(
    graph: fx.Graph, find: Callable[[fx.Node, dict[fx.Node, fx.Node]], fx.Node]
) -> dict[fx.Node, fx.Node]:
    """What ``find`` makes of each node, given what it made of those before."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        found[node] = find(node, found)
    return found
