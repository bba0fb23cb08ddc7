"""Moves ``unshard_param`` calls out of activation-checkpointed regions.

Dynamo puts a checkpointed region into a sub-graph, with the parameters among its operands and the calls
inside. There the gather would be repeated under the checkpoint's policy, once for each region. Outside, the
unit's own policy decides, and the region takes full parameters.
"""

from __future__ import annotations

import torch
from torch import fx

from ..runtime.marker import CHECKPOINT, unshard_param
from .context import CompileContext, fail

_NESTED = torch.ops.higher_order.invoke_subgraph


def hoist(gm: fx.GraphModule, context: CompileContext) -> None:
    for node in list(gm.graph.nodes):
        if node.target is _NESTED:
            # Differentiated as a graph of its own, whose forward hands views of parameters to its backward, and no
            # schema says so.
            what = "torch.compiler.nested_compile_region (or torch._dynamo.config.use_graph_deduplication)"
            fail(context, node, f"{what} is not supported: leave it out")
        bodies = [arg for arg in node.all_input_nodes if arg.op == "get_attr" and _body(gm, arg) is not None]
        for body_node in bodies:
            body = _body(gm, body_node)
            assert body is not None
            hoist(body, context)
            markers = [n for n in body.graph.nodes if n.target is unshard_param]
            # In other operators' bodies `unshard_param` refuses to be traced.
            assert not markers or (node.target is CHECKPOINT and node.args[0] is body_node)
            _hoist_from(body, markers, gm, node)


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    body = getattr(gm, str(node.target), None)
    return body if isinstance(body, fx.GraphModule) else None


def _hoist_from(body: fx.GraphModule, markers: list[fx.Node], gm: fx.GraphModule, region: fx.Node) -> None:
    """Replaces, for each marked operand of ``region``, the operand by the call and the call by the operand. Of several
    calls the last one is the operand; the others are there to be looked at: each has an example of its own."""
    placeholders = body.graph.find_nodes(op="placeholder")
    operands = list(region.args)
    for marker in markers:
        inner = marker.args[0]
        position = 1 + placeholders.index(inner)
        operand = operands[position]
        assert isinstance(inner, fx.Node) and isinstance(operand, fx.Node)
        param = operand.args[0] if operand.target is unshard_param else operand
        with gm.graph.inserting_before(region):
            outer = gm.graph.call_function(unshard_param, (param, *marker.args[1:]))
        outer.meta = dict(marker.meta)
        operands[position] = outer
        inner.meta["example_value"] = marker.meta["example_value"]
        marker.replace_all_uses_with(inner)
        body.graph.erase_node(marker)
    region.args = tuple(operands)
    body.recompile()
