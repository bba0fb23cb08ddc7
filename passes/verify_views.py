"""What :mod:`verify` proves of views: that it has taken for one whatever shares communication memory, and that none
reaches out of what it is a view of."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..torch_internals.tracing import size_hint
from .context import Buffer, CompileContext, buffer_of, fail, is_allocation
from .edit import value_of


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
            if mark is not None and node.target is torch.ops.aten.as_strided.default:
                _check_reach(node, arg, bases[arg], mark, context)


def _memory(node: fx.Node) -> Iterator[int]:
    """Of the tensors in a node's example."""
    for each in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(each, Tensor) and each.layout is torch.strided:
            yield each.untyped_storage()._cdata


def _check_reach(node: fx.Node, source: fx.Node, buffer: fx.Node, mark: Buffer, context: CompileContext) -> None:
    """Strides that a program gives stay in the parameter that they are given to. An offset is one in the whole slot,
    of which a buffer has the place that it is given when the graph runs."""
    held = context.named(mark)
    if len(node.args) > 3 and not is_allocation(buffer):
        fail(context, node, f"a view of the {held} is at an offset from the beginning of what their slot is a part of")
    (begin, end), (start, stop), size = _reach(source), _reach(node), buffer.meta["val"].itemsize
    views = context.units[mark.unit].views
    places = [(view.offset * size, (view.offset + view.numel) * size) for view in views]
    if not any(first <= min(begin, start) and max(end, stop) <= last for first, last in places):
        fail(
            context,
            node,
            f"a view of the {held} at byte {begin} reaches from {start} to {stop}, into what is another's",
        )


def _reach(view: fx.Node) -> tuple[int, int]:
    """The bytes of a buffer, which is the beginning of its memory, from the first to behind the last one of a view."""
    value = value_of(view)
    assert value is not None
    offset = size_hint(value.storage_offset()) * value.itemsize
    steps = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size_hint(size) - 1) * size_hint(stride) for size, stride in steps)
    return offset, offset + (span if size_hint(value.numel()) else 0) * value.itemsize
