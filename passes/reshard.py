"""Decides, in the joint graph, what the backward gathers again and what it keeps.

For a unit that is resharded after its forward: the gather, the cast that feeds it, and everything that PyTorch's own
operators compute from parameters alone (views, transposes, casts) are marked for recomputation, so the partitioner
saves the shard and nothing else of the unit. Marking the views alone would save a cast that follows them. A unit that
is kept is marked so that its gather is not repeated. A custom operator may draw random numbers, or keep a state, of
which nothing tells: what it computes is the partitioner's to save.

The joint graph also says which gradients there are, and it is the last one that does so: what the backward must
reduce, and which parameters get a gradient, is recorded in the context.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..runtime import ops, quantized_ops
from ..schemas import is_of_python
from .context import CompileContext

GATHERS = (ops.all_gather, quantized_ops.all_gather_quantized)
_KNOWN = ("aten", "prims", "vescale")  # namespaces
REDUCTIONS = (ops.reduce_scatter, quantized_ops.reduce_scatter_quantized)


def reshard(gm: fx.GraphModule, context: CompileContext) -> None:
    recomputed: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.target is ops.pack or node.target in REDUCTIONS:
            node.meta["partitioner_tag"] = "must_be_in_backward"  # also of gradients that are the same for every loss
        if node.target in GATHERS:
            if context.reshards(node.args[1]):
                recomputed |= {node, *casts_before(node)}
            else:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif _depends_only_on(node, recomputed):
            recomputed.add(node)
    for node in recomputed:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    context.reduced_units = tuple(node.args[1] for node in gm.graph.nodes if node.target in REDUCTIONS)
    context.gradients = {node.args[6]: frozenset(node.args[2]) for node in gm.graph.nodes if node.target is ops.pack}


def casts_before(gather: fx.Node) -> list[fx.Node]:
    """What lies between the shard, an input of the graph, and its gather."""
    found: list[fx.Node] = []
    queue = list(gather.all_input_nodes)
    while queue:
        node = queue.pop()
        if node.op == "call_function":
            found.append(node)
            queue.extend(node.all_input_nodes)
    return found


def _depends_only_on(node: fx.Node, nodes: set[fx.Node]) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return _is_repeatable(node.target) and all(arg in nodes for arg in node.all_input_nodes)


def _is_repeatable(target: object) -> bool:
    """Whether what is called is known to compute the same again."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace in _KNOWN and torch.Tag.nondeterministic_seeded not in target.tags
    return is_of_python(target)
