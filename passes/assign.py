"""Assigns communication buffers to slots: static memory that a graph gets as input, one buffer after another.

Lifetimes are known from the order of the graph: from the node that first touches a buffer to the last one that
reads it. Buffers that live at the same time get different slots; a slot is as large as the largest of its buffers.
Largest first, each buffer takes the first slot that is free while it lives, so small units share the slots of
large ones. A buffer that outlives the graph (parameters kept for the backward, gradients) stays an allocation. One
that is filled for the backward while the forward ends has a slot that holds nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ..runtime.pool import SlotSpec
from ..torch_internals import fake_mode_of
from .aliases import bases_of, touches_of
from .context import CompileContext, buffer_of, marked_buffer
from .edit import call, order_of
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

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass
class _Tenants:
    dtype: torch.dtype
    carried: str = ""
    lifetimes: list[Lifetime] = field(default_factory=list)

    @property
    def spec(self) -> SlotSpec:
        largest = self.lifetimes[0].node.meta["val"]
        return SlotSpec(largest.numel(), largest.dtype, largest.device, self.carried)


def assign(gm: fx.GraphModule, context: CompileContext) -> None:
    assert context.part is not None
    slots = _share(lifetimes(gm.graph))
    context.slot_uses[context.part] = tuple(_describe(slot, context) for slot in slots)
    context.slots[context.part] = tuple(slot.spec for slot in slots)
    for number, slot in enumerate(slots):
        _append_input(gm.graph, f"slot_{number}", slot)
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
    return tuple(slot.spec for slot in _share(buffers))


def _share(buffers: Sequence[Lifetime]) -> list[_Tenants]:
    slots: list[_Tenants] = []
    for lifetime in sorted(buffers, key=lambda each: (-each.numel, each.first)):
        carried = marked_buffer(lifetime.node).carried
        fitting = (
            slot
            for slot in slots
            if slot.dtype == lifetime.dtype
            and not slot.carried
            and not any(lifetime.overlaps(other) for other in slot.lifetimes)
        )
        slot = None if carried else next(fitting, None)
        if slot is None:
            slots.append(slot := _Tenants(lifetime.dtype, carried))
        slot.lifetimes.append(lifetime)
    return slots


def _describe(slot: _Tenants, context: CompileContext) -> SlotUse:
    tenants = []
    for lifetime in sorted(slot.lifetimes, key=lambda each: each.first):
        buffer = marked_buffer(lifetime.node)
        what = f"{buffer.use.value} of {context.units[buffer.unit].name}"
        tenants.append(Tenant(what, lifetime.nbytes, lifetime.first, lifetime.last))
    return SlotUse(str(slot.dtype), slot.lifetimes[0].nbytes, tuple(tenants), bool(slot.carried))


def _append_input(graph: fx.Graph, name: str, slot: _Tenants) -> None:
    spec = slot.spec
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1]):
        placeholder = graph.placeholder(name)
    with fake_mode_of(graph):
        placeholder.meta["val"] = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
    for lifetime in slot.lifetimes:
        with graph.inserting_before(lifetime.node):
            mark = lifetime.node.meta["vescale"]
            part = call(graph, torch.ops.aten.slice.Tensor, placeholder, 0, 0, lifetime.numel, mark=mark)
        lifetime.node.replace_all_uses_with(part)
        graph.erase_node(lifetime.node)
