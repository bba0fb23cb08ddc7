"""What :mod:`verify` proves of views: that it has taken for one whatever shares communication memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .context import CompileContext, buffer_of, fail


def check_views(graph: fx.Graph, bases: dict[fx.Node, fx.Node], context: CompileContext) -> None:
    """No result has memory of a buffer, as examples show it, where nothing says that it is a view. A slot would be
    taken for free while the view is still to be read."""
    for node in graph.nodes:
        if node.op != "call_function" or "vescale" in node.meta:
            continue  # what passes have marked, they know
        for arg in node.all_input_nodes:
            mark = buffer_of(bases[arg])
            if mark is not None and bases[node] is not bases[arg] and not set(_memory(node)).isdisjoint(_memory(arg)):
                held = context.named(mark)
                fail(context, node, f"the result lies in memory of the {held}, and no schema says so")


def _memory(node: fx.Node) -> Iterator[int]:
    """Of the tensors in a node's example."""
    for each in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(each, Tensor) and each.layout is torch.strided:
            yield each.untyped_storage()._cdata
