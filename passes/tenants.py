"""Holds what Inductor's own passes make of a final graph to what was verified.

They run behind ours, and not all of them ask where memory is written: where a copy of a parameter changes nothing, say,
they have the parameter itself read in its place, later than ours knew of. So each view of a slot says which of the
slot's buffers it is of, and the last pass of all looks whether that buffer is there where the view is read. And they
replace what writes in place by what does not, where they see nobody who reads it: gradients are only reduced. So each
slot says how many nodes write there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import fx

from ..runtime.quantized_ops import start_reduce_scatter_quantized
from ..schemas import is_view, viewed, written_by
from .aliases import allocations_of, bases_of
from .context import GraphError, Role, buffer_of, comm_of
from .slot_memory import sharing_memory

_TENANTS = "vescale_tenants"  # in a node's meta: names of buffers, by the names of slots that it touches
_WRITES = "vescale_writes"  # in a slot's meta: how many nodes write there

_ADVICE = (
    "Leave out the passes that you have turned on in torch._inductor.config, or compile with options={'lowering': "
    "'eager'}; without such passes, please report the model"
)


def note_tenants(graph: fx.Graph) -> None:
    """Notes on all that views, reads or writes a slot which of its buffers that is, and on slots how often they are
    written."""
    bases, memory = bases_of(graph), allocations_of(graph)
    for slot, count in _writes(graph, memory).items():
        slot.meta[_WRITES] = count
    for node in graph.nodes:
        touched = [node] if is_view(node) else node.all_input_nodes
        node.meta[_TENANTS] = {
            memory[each].name: bases[each].name
            for each in touched
            if memory[each].op == "placeholder" and buffer_of(bases[each]) is not None
        }


def check_tenants(graph: fx.Graph) -> None:
    """Raises GraphError where a slot is read while another buffer is in it, or a collective in flight; and where it is
    written less often than was noted.

    What has no note is not looked at: a read of a whole slot, not through a view, say.
    """
    memory, sharing = allocations_of(graph), sharing_memory(graph)
    _check_writes(graph, memory)
    of_view: dict[fx.Node | None, str | None] = {}
    held: dict[fx.Node, str] = {}
    in_flight: set[fx.Node] = set()
    for node in graph.nodes:
        noted = node.meta.get(_TENANTS, {})
        if is_view(node):
            of_view[node] = noted.get(memory[node].name) or of_view.get(viewed(node))
            continue
        comm, written = comm_of(node), written_by(node)
        sent_as_codes = node.args[0] if node.target is start_reduce_scatter_quantized else None
        for arg in node.all_input_nodes:
            slot = memory[arg]
            ours = comm is not None or arg in written  # which Inductor keeps; their notes serve where the view is gone
            tenant = of_view.get(arg) or (noted.get(slot.name) if ours else None)
            if tenant is None:
                continue
            if arg in written:
                held.update(dict.fromkeys(sharing[slot], tenant))
            elif held.get(slot) != tenant or slot in in_flight:
                raise GraphError(
                    f"{node.format_node()} reads {slot.name} where it does not hold what the program reads there: one "
                    f"of Inductor's passes has moved it. {_ADVICE}"
                )
            if arg is sent_as_codes:
                continue
            if comm is not None and comm.role is Role.LAUNCH:
                in_flight.add(slot)
            elif comm is not None:
                in_flight.discard(slot)


def _check_writes(graph: fx.Graph, memory: Mapping[fx.Node, fx.Node]) -> None:
    left = _writes(graph, memory)
    for slot in graph.find_nodes(op="placeholder"):
        if left[slot] < (noted := slot.meta.get(_WRITES, 0)):
            raise GraphError(
                f"{slot.name} is written {left[slot]} times, where the program writes it {noted} times: one of "
                f"Inductor's passes has dropped a gradient, say. {_ADVICE}"
            )


def _writes(graph: fx.Graph, memory: Mapping[fx.Node, fx.Node]) -> Counter[fx.Node]:
    """How many nodes write to each node that allocates."""
    return Counter(memory[arg] for node in graph.nodes for arg in written_by(node))
