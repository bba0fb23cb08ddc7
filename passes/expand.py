"""Replaces the package's operators by PyTorch's.

A collective becomes a launch and a wait of PyTorch's functional collectives, next to each other: two nodes,
each with a :class:`Comm`. Packing becomes a concatenation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from ..runtime import ops
from ..torch_internals import lowering_decompositions
from .context import ALL_GATHER, REDUCE_SCATTER, Comm, CompileContext, Role

_functional = torch.ops._c10d_functional


def expand(gm: fx.GraphModule, context: CompileContext) -> None:
    for node in list(gm.graph.nodes):
        if node.target is ops.all_gather:
            shard, unit, world_size, group = node.args
            gather = _functional.all_gather_into_tensor.default
            _replace(node, gather, (shard, world_size, group), Comm(ALL_GATHER, Role.LAUNCH, unit))
        elif node.target is ops.reduce_scatter:
            full, unit, reduce_op, world_size, group = node.args
            reduce = _functional.reduce_scatter_tensor.default
            args = (full, reduce_op, world_size, group)
            _replace(node, reduce, args, Comm(REDUCE_SCATTER, Role.LAUNCH, unit))
        elif node.target is ops.pack:
            grads, *layout = node.args
            _inline(node, lambda *grads, layout=layout: ops.pack_by_cat(grads, *layout), grads)


def _replace(node: fx.Node, target: OpOverload, args: tuple[Any, ...], comm: Comm) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        launch = graph.call_function(target, args)
        wait = graph.call_function(_functional.wait_tensor.default, (launch,))
    launch.meta = {**node.meta, "vescale": comm}
    wait.meta = {**node.meta, "vescale": replace(comm, role=Role.WAIT)}
    node.replace_all_uses_with(wait)
    graph.erase_node(node)


def _inline(node: fx.Node, function: Callable[..., Tensor], inputs: Sequence[fx.Node]) -> None:
    """Replaces ``node`` by the aten operators that ``function`` calls on ``inputs``."""
    values = [arg.meta["val"] for arg in inputs]
    with values[0].fake_mode:  # or zeros would be real tensors in the graph
        traced = make_fx(function, decomposition_table=lowering_decompositions())(*values)
    placeholders = traced.graph.find_nodes(op="placeholder")
    with node.graph.inserting_before(node):
        result = node.graph.graph_copy(traced.graph, dict(zip(placeholders, inputs, strict=True)))
    node.replace_all_uses_with(cast(fx.Node, result))
    node.graph.erase_node(node)
