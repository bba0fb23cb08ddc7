"""Leaves the backward's last reductions in flight: their gradients are waited for when they are first read.

Those are the reductions whose waits the schedule has put behind all computation. What reads the gradients, a fused
optimizer say, can begin with those that have come. A cast of what is reduced waits with it. Waits that communicate are
not put off, because ranks need not read their gradients in one order: those over replicas, but on GPUs. Nor is any
where Inductor's code itself reads the gradients, to look for NaN.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..cost.collectives import REDUCE_SCATTER
from ..runtime import leaving, ops, quantized_ops
from ..schemas import is_view
from .context import Buffer, CompileContext, Role, Use, buffer_of, comm_of, marked_buffer
from .edit import allocate, call
from .moves import CASTS

_LEFT = {
    ops.wait_reduce_scatter: leaving.leave_reduce_scatter,
    quantized_ops.wait_reduce_scatter_quantized: leaving.leave_reduce_scatter_quantized,
}


def leave(gm: fx.GraphModule, context: CompileContext) -> None:
    if torch._inductor.config.nan_asserts:
        return
    for wait in _last_waits(gm.graph):
        mark = comm_of(wait)
        assert mark is not None
        if _wait_communicates(wait, context.units[mark.unit].comm.replicas):
            continue
        wait.target = _LEFT[wait.target]  # type: ignore[index]
        wait.meta["vescale"] = replace(mark, role=Role.LEAVE)
        (reduced,) = (arg for arg in wait.all_input_nodes if marked_buffer(arg).use is Use.REDUCED)
        for cast in [user for user in reduced.users if user.target in CASTS]:
            _put_off(cast, reduced, mark.unit)


def _last_waits(graph: fx.Graph) -> list[fx.Node]:
    """The waits for reductions behind the last computation and the last launch, the last first."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node.op == "output" or is_view(node) or buffer_of(node) is not None or _casts_reduced(node):
            continue
        mark = comm_of(node)
        if mark is None or mark.kind != REDUCE_SCATTER or mark.role is not Role.WAIT:
            break
        found.append(node)
    return found


def _casts_reduced(node: fx.Node) -> bool:
    mark = buffer_of(node.all_input_nodes[0]) if node.target in CASTS else None
    return mark is not None and mark.use is Use.REDUCED


def _wait_communicates(wait: fx.Node, replicas: str) -> bool:
    on_gpu = wait.all_input_nodes[0].meta["val"].device.type == "cuda"
    return replicas != "" and not on_gpu


def _put_off(cast: fx.Node, reduced: fx.Node, unit: int) -> None:
    graph, value = cast.graph, cast.meta["val"]
    with graph.inserting_before(cast):
        result = allocate(graph, value.numel(), like=value, mark=Buffer(Use.REDUCED, unit))
        call(graph, leaving.cast_when_read, reduced, result, unit)
    cast.replace_all_uses_with(result)
    graph.erase_node(cast)
