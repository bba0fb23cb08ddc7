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
    sharing = {node: [node] for node in inputs}
    places = {node: place for node in inputs if (place := node.meta.get(_PLACE)) is not None}
    begun: list[fx.Node] = []  # in the order of their places, those that may reach as far as the next
    for node in sorted(places, key=lambda node: places[node].offset):
        begun = [other for other in begun if places[other].end > places[node].offset]
        for other in begun:
            if places[other].overlaps(places[node]):
                sharing[node].append(other)
                sharing[other].append(node)
        begun.append(node)
    return {node: tuple(others) for node, others in sharing.items()}
