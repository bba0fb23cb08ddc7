"""What :mod:`verify` proves of bytes: those that are copied, those that are reduced, and those that are taken."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import torch
from torch import fx

from ..quantities import least_text, size_text
from ..runtime import ops
from ..runtime.pool import pooled_bytes
from ..schemas import written_by
from .context import (
    CompileContext,
    Copied,
    Use,
    buffer_of,
    comm_of,
    fail,
    is_allocation,
    marked_buffer,
)
from .edit import value_of
from .memory import GraphMemory
from .moves import moved_parameters
from .overlap import largest_first
from .sink import is_store


def check_copies(graph: fx.Graph, bases: dict[fx.Node, fx.Node], context: CompileContext) -> None:
    """Gathered parameters are moved by the program alone, and gradients by what says so and is counted."""
    for unit, operator in moved_parameters(graph, bases, context) - context.moved:
        name = context.units[unit].name
        fail(context, None, f"the gathered parameters of unit {name} are moved by {operator}, and not by the program")
    for copy in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        place, value = copy.all_input_nodes
        if not _is_gradients(bases[place]) or isinstance(copy.meta.get("vescale"), Copied):
            continue
        if len(value.users) > 1 or not is_store(value, context):
            name = context.units[marked_buffer(bases[place]).unit].name
            fail(context, copy, f"a gradient of unit {name} is copied into its place, and nothing counts it")


def check_written(graph: fx.Graph, bases: dict[fx.Node, fx.Node], context: CompileContext) -> None:
    """When gradients are reduced each parameter's place was written: with its gradient, or with zeros. What an earlier
    tenant of the slot left between places is nobody's, and nothing is added to what it left in them."""
    written: dict[fx.Node, _Written] = defaultdict(_Written)
    for node in graph.nodes:
        comm = comm_of(node)
        for place in written_by(node) if comm is None else ():
            buffer = bases[place]
            if _is_gradients(buffer):
                start, stop = _extent(place)
                if not _accumulates(node):
                    _check_unwritten(start, stop, written[buffer], node, buffer, context)
                    written[buffer].add(start, stop)
        if node.op == "output" or comm is not None:
            for buffer in dict.fromkeys(bases[arg] for arg in node.all_input_nodes):
                if _is_gradients(buffer):
                    _check_covered(buffer, written[buffer], context)


class _Written:
    """Elements of a buffer that were written, as intervals which have none in common."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        assert start < stop
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._stops.insert(at, stop)

    def any(self, start: int, stop: int) -> bool:
        at = bisect_right(self._stops, start)
        return at < len(self._starts) and self._starts[at] < stop

    def first_without(self, start: int, stop: int) -> int:
        """The first of the elements that was not written; none before ``stop`` if all were."""
        at = bisect_right(self._stops, start)
        while start < stop and at < len(self._starts) and self._starts[at] <= start:
            start = self._stops[at]
            at += 1
        return start


def _check_unwritten(
    start: int, stop: int, written: _Written, node: fx.Node, buffer: fx.Node, context: CompileContext
) -> None:
    if written.any(start, stop):
        name = context.units[marked_buffer(buffer).unit].name
        fail(context, node, f"a gradient of unit {name} is written where one was written before")


def _accumulates(node: fx.Node) -> bool:
    """Whether a write adds to what is there."""
    if node.target is ops.matmul_into:
        return bool(node.args[3])
    return node.target is torch.ops.aten.index_put_.default and len(node.args) > 3 and bool(node.args[3])


def _is_gradients(buffer: fx.Node) -> bool:
    mark = buffer_of(buffer)
    return mark is not None and mark.use is Use.GRADIENTS


def _extent(place: fx.Node) -> tuple[int, int]:
    """The elements of a buffer, which is the beginning of its memory, from the first to behind the last one of a place,
    which is dense."""
    value = value_of(place)
    assert value is not None
    start = int(value.storage_offset())
    return start, start + int(value.numel())


def _check_covered(buffer: fx.Node, written: _Written, context: CompileContext) -> None:
    mark = marked_buffer(buffer)
    unit = context.units[mark.unit]
    for view in (*unit.views, *unit.others):
        stop = view.offset + view.numel
        at = written.first_without(view.offset, stop)
        if at < stop:
            fail(
                context,
                buffer,
                f"the gradients of unit {unit.name} are reduced, or returned, before element {at} of them is written, "
                f"which is of the parameter at {view.offset} to {stop}",
            )


def check_memory(graph: fx.Graph, context: CompileContext) -> None:
    """What lies in a slot fits there, and the step, as far as it is known yet, takes no more than the budget."""
    for node in graph.nodes:
        if buffer_of(node) is not None and not is_allocation(node):
            _check_fits(node, context)
    budget = context.memory_budget
    if budget is None:
        return
    assert context.part is not None
    slots = pooled_bytes(context.slots.values(), context.turns)
    peaks = [
        GraphMemory(graph, context, context.part).peak(),
        *(summary.peak for summary in context.summaries.values()),
    ]
    taken = context.standing_bytes + slots + max(peak.nbytes for peak in peaks)
    if taken > budget:
        fail(
            context,
            None,
            f"memory_budget is {size_text(budget)}, but a step takes {size_text(taken)} with its slots "
            f"({size_text(slots)}) and the shards of all units ({size_text(context.standing_bytes)}). Give at least "
            f"{least_text(taken)}, or make units smaller. {largest_first(context)}",
        )


def _check_fits(buffer: fx.Node, context: CompileContext) -> None:
    """A buffer is the beginning of its slot; PyTorch would cut off what is too long."""
    slot, end = value_of(buffer.all_input_nodes[0]), buffer.args[3]
    assert slot is not None and isinstance(end, int)
    if end > slot.numel():
        mark = marked_buffer(buffer)
        fail(
            context,
            buffer,
            f"the {mark.use.value} of unit {context.units[mark.unit].name}, {end} elements, do not fit into their slot "
            f"of {slot.numel()}",
        )
