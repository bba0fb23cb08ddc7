"""Which slots of a graph have memory in common."""

from __future__ import annotations

from torch import fx

from ..runtime.pool import SlotSpec

_PLACE = "vescale_place"  # in the meta of an input that is a slot: its SlotSpec


def note_place(slot: fx.Node, spec: SlotSpec) -> None:
    slot.meta[_PLACE] = spec


def sharing_memory(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each input of a graph, those that have memory in common with it: itself, and of slots others too."""
    inputs = graph.find_nodes(op="placeholder")
    places = {node: place for node in inputs if (place := node.meta.get(_PLACE)) is not None}
    return {
        node: tuple(other for other in places if places[other].overlaps(places[node])) if node in places else (node,)
        for node in inputs
    }
