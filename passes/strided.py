"""Refuses views of gathered parameters that say where in their memory they begin, as ``as_strided`` does that is given
a ``storage_offset``: the parameter begins somewhere in its unit's memory, and what lies there is another's.

To Dynamo each parameter begins its own memory, as it does before ``fully_shard``, so what an offset means is known, but
not to the operator. Nor is an offset of the parameter's own told from others: where a program asks for it, it leaves
compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..torch_internals.tracing import all_nodes
from .context import CompileContext, fail
from .unwritten import line_of, memory_of, names_by_memory

_BEHIND = {"as_strided": 3, "as_strided_": 3, "as_strided_copy": 3, "as_strided_scatter": 4}
"""The operators, and where their arguments have the offset."""


def check_strided(gm: fx.GraphModule, names: Mapping[fx.Node, str], context: CompileContext) -> None:
    """
    Args:
        gm: Dynamo's graph; those of its regions are looked at, too.
        names: of the parameters, by the nodes that read them.

    Raises:
        GraphError: a view of a parameter begins where the program says.
    """
    memory = names_by_memory(names)
    for node in all_nodes(gm):
        if not _has_offset(node):
            continue
        for place in map(memory_of, node.all_input_nodes):
            if place in memory:
                fail(
                    context,
                    node,
                    f"parameter {memory[place]!r} is viewed by as_strided at a storage_offset. Inside forward it is a "
                    "part of its unit's memory, where other parameters lie at that offset: leave storage_offset out, "
                    "or clone() the parameter first" + line_of(node, "it is viewed"),
                )


def _has_offset(node: fx.Node) -> bool:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    position = _BEHIND.get(target.partition(".")[0])
    if position is None:
        return False
    offset = node.args[position] if position < len(node.args) else node.kwargs.get("storage_offset")
    return offset is not None
