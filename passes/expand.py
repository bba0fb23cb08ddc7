"""Replaces the package's operators by PyTorch's.

A collective becomes a launch and a wait of PyTorch's functional collectives, next to each other: two nodes,
each with a :class:`Comm`. Packing becomes a concatenation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ..runtime import ops
from .context import ALL_GATHER, REDUCE_SCATTER, Comm, CompileContext, Role

_functional = torch.ops._c10d_functional


def expand(gm: fx.GraphModule, context: CompileContext) -> None:
    for node in list(gm.graph.nodes):
        if node.target is ops.all_gather:
            shard, unit, world_size, group = node.args
            args = (shard, world_size, group)
            _replace(node, _functional.all_gather_into_tensor.default, args, ALL_GATHER, unit)
        elif node.target is ops.reduce_scatter:
            full, unit, reduce_op, world_size, group = node.args
            args = (full, reduce_op, world_size, group)
            _replace(node, _functional.reduce_scatter_tensor.default, args, REDUCE_SCATTER, unit)
        elif node.target is ops.pack:
            grads, *layout = node.args
            _inline(node, lambda *grads, layout=layout: ops.pack_by_cat(grads, *layout), grads)


def _replace(node: fx.Node, target: object, args: tuple[object, ...], kind: str, unit: int) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        launch = graph.call_function(target, args)  # type: ignore[arg-type]
        wait = graph.call_function(_functional.wait_tensor.default, (launch,))
    for new, role in ((launch, Role.LAUNCH), (wait, Role.WAIT)):
        new.meta = {**node.meta, "vescale": Comm(kind, role, unit)}
    node.replace_all_uses_with(wait)
    graph.erase_node(node)


def _inline(node: fx.Node, function: Callable[..., Tensor], inputs: Sequence[fx.Node]) -> None:
    """Replaces ``node`` by the aten operators that ``function`` calls on ``inputs``."""
    traced = make_fx(function)(*(arg.meta["val"] for arg in inputs))
    placeholders = traced.graph.find_nodes(op="placeholder")
    with node.graph.inserting_before(node):
        result = node.graph.graph_copy(traced.graph, dict(zip(placeholders, inputs, strict=True)))
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
