"""Replaces each collective by a launch and a wait of PyTorch's functional collectives.

They stand next to each other here. From now on a collective is two nodes, each with a :class:`Comm`.
"""

from __future__ import annotations

import torch
from torch import fx

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


def _replace(node: fx.Node, target: object, args: tuple[object, ...], kind: str, unit: int) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        launch = graph.call_function(target, args)  # type: ignore[arg-type]
        wait = graph.call_function(_functional.wait_tensor.default, (launch,))
    for new, role in ((launch, Role.LAUNCH), (wait, Role.WAIT)):
        new.meta = {**node.meta, "vescale": Comm(kind, role, unit)}
    node.replace_all_uses_with(wait)
    graph.erase_node(node)
