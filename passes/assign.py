"""Assigns communication buffers to slots: places in static memory, that a graph gets as inputs.

Lifetimes are known from the order of the graph: from the node that first touches a buffer to the last one that
reads it. Largest first, each buffer lies in the first place where nothing else does while it lives: where a large one
was, small ones lie side by side. Buffers of the same size and dtype that lie in the same place, one after another, have
a slot in common; slots of other places may share some of their memory. A buffer that outlives the graph (parameters
kept for the backward, gradients) stays an allocation. What is filled for the backward while the forward ends lies in
memory that holds nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..runtime.pool import ALIGNMENT, SlotSpec
from ..torch_internals import fake_mode_of
from .aliases import bases_of, touches_of
from .context import CompileContext, Use, buffer_of, marked_buffer
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
    def numel(self) -> int:
        return self.node.meta["val"].numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


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
    for lifetime, place in places_for(lifetimes(gm.graph)).items():
        slots.setdefault(place, []).append(lifetime)
    context.slot_uses[context.part] = tuple(_describe(slot, tenants, context) for slot, tenants in slots.items())
    context.slots[context.part] = tuple(slots)
    for number, (slot, tenants) in enumerate(slots.items()):
        _append_input(gm.graph, f"slot_{number}", slot, tenants)
    note_tenants(gm.graph)


def lifetimes(graph: fx.Graph) -> list[Lifetime]:
    """Of the communication buffers that live within the graph, in its order."""
    order = order_of(graph)
    return [
        Lifetime(buffer, order[users[0]], order[users[-1]])
        for buffer, users in touches_of(graph, bases_of(graph)).items()
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
        begin = _aligned(ends[memory])
        for lifetime, offset in _offsets(sharing).items():
            place = places[lifetime] = _spec(lifetime, begin + offset)
            ends[memory] = max(ends[memory], place.end)
    return places


def _spec(lifetime: Lifetime, offset: int = 0) -> SlotSpec:
    carried = marked_buffer(lifetime.node).carried
    return SlotSpec(lifetime.numel, lifetime.dtype, lifetime.node.meta["val"].device, carried, offset)


def _offsets(buffers: Sequence[Lifetime]) -> dict[Lifetime, int]:
    """Each buffer's place, in bytes from the beginning of what they share; the largest buffer is the first."""
    beside = _living_beside(buffers)
    offsets: dict[Lifetime, int] = {}
    for lifetime in sorted(buffers, key=lambda each: (-each.nbytes, each.first)):
        taken = sorted((offsets[other], other.nbytes) for other in beside[lifetime] if other in offsets)
        offset = 0
        for start, nbytes in taken:
            if offset + lifetime.nbytes <= start:
                break
            offset = max(offset, _aligned(start + nbytes))
        offsets[lifetime] = offset
    return offsets


def _living_beside(buffers: Sequence[Lifetime]) -> dict[Lifetime, list[Lifetime]]:
    """For each buffer, those that live at the same time; what is carried from graph to graph outlives each."""
    beside: dict[Lifetime, list[Lifetime]] = {lifetime: [] for lifetime in buffers}
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
        buffer = marked_buffer(lifetime.node)
        what = f"{buffer.use.value} of {context.units[buffer.unit].name}"
        tenants.append(Tenant(what, lifetime.nbytes, lifetime.first, lifetime.last))
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
            part = call(graph, torch.ops.aten.slice.Tensor, placeholder, 0, 0, lifetime.numel, mark=mark)
        lifetime.node.replace_all_uses_with(part)
        graph.erase_node(lifetime.node)
