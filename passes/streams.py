"""Refuses programs that use a GPU's streams, or events, inside compiled code.

Collectives are launched and waited for on the stream that the graph runs on, and slots are given away by the order of
the graph's nodes. What runs on another stream is ordered by neither.
"""

from __future__ import annotations

from torch import fx

from ..torch_internals.tracing import all_nodes, names_a_stream
from .context import CompileContext, fail
from .unwritten import line_of


def check_streams(gm: fx.GraphModule, context: CompileContext) -> None:
    """
    Args:
        gm: Dynamo's graph; those of its regions are looked at, too.

    Raises:
        GraphError: a node runs on a stream that the program chose, or orders streams, or waits for a GPU.
    """
    for node in all_nodes(gm):
        if names_a_stream(node):
            fail(
                context,
                node,
                "compiled code uses streams or events of a GPU, or synchronizes it. Parameters are gathered for the "
                "stream that it is called on, as the schedule says: leave that out, or put what does it, and reads no "
                "parameter, into a function under torch.compiler.disable" + line_of(node, "it is done"),
            )
