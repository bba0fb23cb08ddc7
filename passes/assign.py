"""Assigns communication buffers to slots: places in static memory, that a graph gets as inputs.

Lifetimes are known from the order of the graph: from the node that first touches a buffer to the last one that
reads it. Each lies where nothing else does while it lives: where a large one was, small ones lie side by side. Buffers
of the same size and dtype that lie in the same place, one after another, have a slot in common; slots of other places
may share some of their memory. A buffer that outlives the graph (parameters kept for the backward, gradients) stays an
allocation. What is filled for the backward while the forward ends lies in memory that holds nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from ..cost.collectives import ALL_GATHER
from ..runtime import ops
from ..runtime.collectives import checked_for_nan
from ..runtime.pool import ALIGNMENT, SlotSpec
from ..torch_internals.tracing import fake_mode_of
from .aliases import bases_of, touches_of
from .context import CompileContext, Role, Use, buffer_of, comm_of, is_allocation, marked_buffer
from .edit import call, order_of
from .slot_memory import note_place
from .summary import SlotUse, Tenant
from .tenants import note_tenants


@dataclass(frozen=True)
class Lifetime:
    """A communication buffer: the places of the first and of the last node that touch it."""

    node: fx.Node
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.node.meta["val"].nbytes


Beside = dict[Lifetime, list[Lifetime]]

_SEPARATE = {
    Use.PARAMETERS: "parameters",
    Use.PACKED: "parameters",
    Use.GRADIENTS: "gradients",
    Use.SCRATCH: "gradients",
    Use.REDUCED: "reduced",
}
"""Buffers that share memory in a graph. Generated kernels read parameters, write gradients, and read what was reduced:
memory that went from one to the other would hold such a writer behind each such reader, or the other way round."""


def assign(gm: fx.GraphModule, context: CompileContext) -> None:
    assert context.part is not None
    slots: dict[SlotSpec, list[Lifetime]] = {}
    for lifetime, place in places_for(lifetimes(gm.graph, bases_of(gm.graph))).items():
        slots.setdefault(place, []).append(lifetime)
    context.slot_uses[context.part] = tuple(_describe(slot, tenants, context) for slot, tenants in slots.items())
    context.slots[context.part] = tuple(slots)
    for number, (slot, tenants) in enumerate(slots.items()):
        _append_input(gm.graph, f"slot_{number}", slot, tenants)
    note_tenants(gm.graph)
    if context.turns > 1:
        _first_gather_may_have_begun(gm.graph)


def lifetimes(graph: fx.Graph, bases: dict[fx.Node, fx.Node]) -> list[Lifetime]:
    """Of the communication buffers that live within the graph, in its order."""
    order = order_of(graph)
    return [
        Lifetime(buffer, order[users[0]], order[users[-1]])
        for buffer, users in touches_of(graph, bases).items()
        if buffer_of(buffer) is not None and users[-1].op != "output" and buffer.meta["val"].numel() > 0
    ]


def slots_for(buffers: Sequence[Lifetime]) -> tuple[SlotSpec, ...]:
    """The slots that :func:`assign` would give buffers with these lifetimes."""
    return tuple(dict.fromkeys(places_for(buffers).values()))


def places_for(buffers: Sequence[Lifetime]) -> dict[Lifetime, SlotSpec]:
    """Each buffer's slot."""
    apart: dict[tuple[Hashable, str], list[Lifetime]] = {}
    for lifetime in buffers:
        apart.setdefault((_spec(lifetime).memory, _SEPARATE[marked_buffer(lifetime.node).use]), []).append(lifetime)
    ends: Counter[Hashable] = Counter()
    places: dict[Lifetime, SlotSpec] = {}
    for (memory, _), sharing in apart.items():
        begin, offsets = _aligned(ends[memory]), _offsets(sharing)
        for lifetime in sharing:
            place = places[lifetime] = _spec(lifetime, begin + offsets[lifetime])
            ends[memory] = max(ends[memory], place.end)
    return places


def _spec(lifetime: Lifetime, offset: int = 0) -> SlotSpec:
    value, carried = lifetime.node.meta["val"], marked_buffer(lifetime.node).carried
    return SlotSpec(value.numel(), value.dtype, value.device, carried, offset, checked_for_nan())


def _offsets(buffers: Sequence[Lifetime]) -> dict[Lifetime, int]:
    """Each buffer's place, in bytes from the beginning of what they share.

    They are placed one after another: as they come into the graph, from its end on, or the largest first. No order is
    best for all lifetimes: that one is taken by which they take the least memory, or, of equals, the fewest slots.
    """
    beside = _living_beside(buffers)
    coming = sorted(buffers, key=lambda each: each.first)
    leaving = sorted(buffers, key=lambda each: each.last, reverse=True)
    largest = sorted(leaving, key=lambda each: each.nbytes, reverse=True)
    return min((_placed(order, beside) for order in (coming, leaving, largest)), key=_memory_and_slots)


def _placed(order: Sequence[Lifetime], beside: Beside) -> dict[Lifetime, int]:
    """Each where one like it lies, if it can, for few slots to do; or in the first place where nothing is."""
    offsets: dict[Lifetime, int] = {}
    tried: dict[SlotSpec, list[int]] = {}  # where those like it lie
    for lifetime in order:
        taken = sorted((offsets[other], other.nbytes) for other in beside[lifetime] if other in offsets)
        known = tried.setdefault(_spec(lifetime), [])
        again = (offset for offset in known if _is_free(offset, lifetime.nbytes, taken))
        offset = next(again, None)
        if offset is None:
            offset = _first_free(lifetime.nbytes, taken)
            known.append(offset)
        offsets[lifetime] = offset
    return offsets


def _is_free(offset: int, nbytes: int, taken: Sequence[tuple[int, int]]) -> bool:
    return all(offset + nbytes <= start or start + length <= offset for start, length in taken)


def _first_free(nbytes: int, taken: Sequence[tuple[int, int]]) -> int:
    """``taken`` has the beginning and the bytes of each place, in their order."""
    offset = 0
    for start, length in taken:
        if offset + nbytes <= start:
            break
        offset = max(offset, _aligned(start + length))
    return offset


def _memory_and_slots(offsets: dict[Lifetime, int]) -> tuple[int, int]:
    slots = {_spec(lifetime, offset) for lifetime, offset in offsets.items()}
    return max(slot.end for slot in slots), len(slots)


def _living_beside(buffers: Sequence[Lifetime]) -> Beside:
    """For each buffer, those that live at the same time; what is carried from graph to graph outlives each."""
    beside: Beside = {lifetime: [] for lifetime in buffers}
    living: list[Lifetime] = []
    for lifetime in sorted(buffers, key=lambda each: each.first):
        living = [other for other in living if other.last >= lifetime.first or marked_buffer(other.node).carried]
        for other in living:
            beside[lifetime].append(other)
            beside[other].append(lifetime)
        living.append(lifetime)
    return beside


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _describe(slot: SlotSpec, lifetimes: Sequence[Lifetime], context: CompileContext) -> SlotUse:
    tenants = []
    for lifetime in sorted(lifetimes, key=lambda each: each.first):
        what = context.named(marked_buffer(lifetime.node))
        tenants.append(Tenant(what, lifetime.first, lifetime.last))
    return SlotUse(str(slot.dtype), slot.nbytes, slot.offset, tuple(tenants), bool(slot.carried))


def _append_input(graph: fx.Graph, name: str, slot: SlotSpec, tenants: Sequence[Lifetime]) -> None:
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        placeholder = graph.placeholder(name)
    with fake_mode_of(graph):
        placeholder.meta["val"] = torch.empty(slot.numel, dtype=slot.dtype, device=slot.device)
    note_place(placeholder, slot)
    for lifetime in tenants:
        with graph.inserting_before(lifetime.node):
            mark = lifetime.node.meta["vescale"]
            part = call(graph, torch.ops.aten.slice.Tensor, placeholder, 0, 0, slot.numel, mark=mark)
        lifetime.node.replace_all_uses_with(part)
        graph.erase_node(lifetime.node)


def _first_gather_may_have_begun(graph: fx.Graph) -> None:
    """Where it goes to memory that outlives the graph, too: the graph before this one may have launched it, if it gives
    that memory to this one."""
    for launch in _first_launches(graph):
        shard, memory = cast(Sequence[fx.Node], launch.args[:2])
        if is_allocation(memory):
            value: Tensor = memory.meta["val"]
            with graph.inserting_before(memory):
                given = call(
                    graph, ops.all_gather_memory, shard, value.numel(), value.dtype, mark=memory.meta["vescale"]
                )
            memory.replace_all_uses_with(given)
            graph.erase_node(memory)


def _first_launches(graph: fx.Graph) -> Iterator[fx.Node]:
    """Those of the first gather: several, if units share it."""
    for node in graph.nodes:
        comm = comm_of(node)
        if comm is not None and (comm.kind, comm.role) == (ALL_GATHER, Role.LAUNCH):
            yield node
            if not node.kwargs.get("with_next"):
                return
