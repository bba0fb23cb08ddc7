"""What lowering must keep of a graph's order, for the schedule to be the one that was made and verified.

Launches and waits stay in their order, and every operator of a library between the same two of them. Generated kernels
go where what they read and write lets them, but for two things. What reads a slot must run before memory of it is given
to another buffer: Inductor fuses such a kernel with later ones, and then forgets that it had to come before what writes
the slot. And what writes a slot must run when all of its memory is free, of which Inductor knows nothing where another
slot has some of it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from ..schemas import is_view, readers, written_by
from ..torch_internals.inductor_graphs import generates_code_for
from .aliases import allocations_of
from .context import Comm, Role, buffer_of, comm_of
from .slot_memory import sharing_memory
from .tenants import check_tenants

Pairs = list[tuple[fx.Node, fx.Node]]
Slots = dict[fx.Node, fx.Node]  # of each node, where its memory comes from
Sharing = dict[fx.Node, tuple[fx.Node, ...]]  # of each input, those that have memory in common with it


def ordered_nodes(graph: fx.Graph) -> Pairs:
    """Pairs of nodes, the second of which must come after the first.

    Raises GraphError where a slot would be read when it holds something else.
    """
    check_tenants(graph)
    slots, sharing = allocations_of(graph), sharing_memory(graph)
    pairs = _between_collectives(graph)
    pairs += _reads_before_writes(graph, slots, sharing)
    return pairs + _writes_after_collectives(graph, slots, sharing)


def _between_collectives(graph: fx.Graph) -> Pairs:
    """Each launch and wait with the next one, and with every library call that stands between the two."""
    pairs: Pairs = []
    before: list[fx.Node] = []
    between: list[fx.Node] = []
    for node in graph.nodes:
        if comm_of(node) is not None:
            pairs += [(earlier, node) for earlier in before + between]
            before, between = [node], []
        elif _is_library_call(node):
            pairs += [(earlier, node) for earlier in before]
            between.append(node)
    return pairs


def _reads_before_writes(graph: fx.Graph, slots: Slots, sharing: Sharing) -> Pairs:
    """Readers of a slot, each with the operators that write it later.

    Inductor may compute a generated value anew in every kernel that uses it. So what reads a slot is each node that
    uses, through generated ones alone, what was read there. Of these the pins are for the ones whose values are used
    behind the operator that writes: kernels behind it then read what was stored. What is used before it only, other
    kernels wait for that come before it themselves.

    Generated kernels that write gradients into a slot share it with operators that write other gradients: they are
    kept before the reduction only. Calls of libraries need pins where no collective stands between two of them.
    """
    reads = _Reads(graph, slots, sharing)
    for node in graph.nodes:
        if node.op == "call_function":
            reads.visit(node)
    return reads.pairs


class _Reads:
    """What has read each slot, and written it, so far in the order of a graph."""

    def __init__(self, graph: fx.Graph, slots: Slots, sharing: Sharing) -> None:
        self.pairs: Pairs = []
        self._slots, self._sharing = slots, sharing
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._carried: dict[fx.Node, set[fx.Node]] = {}  # by generated node: the slots that its kernels may read
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        self._called: dict[fx.Node, list[fx.Node]] = {}  # readers since the last collective, in libraries

    def visit(self, node: fx.Node) -> None:
        through = {slot for arg in node.all_input_nodes for slot in self._carried.get(arg, ())}
        if is_view(node):
            self._carried[node] = through
            return
        touched = {self._slots[arg] for arg in node.all_input_nodes if self._slots[arg].op == "placeholder"}
        written = {self._slots[arg] for arg in written_by(node)} & touched
        comm = comm_of(node)
        if comm is not None:
            self._collective(node, comm, written)
        elif _is_library_call(node):
            self._library_call(node, touched, written)
        else:
            self._generated(node, touched - written | through, written)

    def _generated(self, node: fx.Node, read: set[fx.Node], written: set[fx.Node]) -> None:
        self._carried[node] = read
        for slot in read:
            self._readers.setdefault(slot, []).append(node)
        for slot in written:
            self._writers.setdefault(slot, []).append(node)

    def _library_call(self, node: fx.Node, touched: set[fx.Node], written: set[fx.Node]) -> None:
        for slot in written:
            self._pin_readers(node, slot)
        for slot in touched - written:
            self._called.setdefault(slot, []).append(node)

    def _collective(self, node: fx.Node, comm: Comm, written: set[fx.Node]) -> None:
        self._called.clear()  # they come before it anyway
        for slot in written:
            self._pin_readers(node, slot)
            self.pairs += [(writer, node) for writer in self._writers.get(slot, ())]
            if comm.role is Role.LAUNCH:  # what comes after this launch comes after them
                self._writers.pop(slot, None)
                for held in self._sharing[slot]:
                    for reader in self._readers.pop(held, ()):
                        self._carried[reader].discard(held)

    def _pin_readers(self, node: fx.Node, slot: fx.Node) -> None:
        """Of memory that a slot has in common with others, before a node that writes the slot."""
        for held in self._sharing[slot]:
            lasting = (each for each in self._readers.get(held, ()) if _lasts(each, self._places[node], self._places))
            self.pairs += [(reader, node) for reader in (*lasting, *self._called.get(held, ()))]


def _writes_after_collectives(graph: fx.Graph, slots: Slots, sharing: Sharing) -> Pairs:
    """Generated writers of a slot, each with the last launch or wait before it in that memory, by whatever slot. What
    calls a library comes after those anyway."""
    last: dict[fx.Node, fx.Node] = {}
    pairs: Pairs = []
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        if comm_of(node) is not None:
            touched = [slots[arg] for arg in node.all_input_nodes if slots[arg].op == "placeholder"]
            last.update(dict.fromkeys((each for slot in touched for each in sharing[slot]), node))
        elif not _is_library_call(node):
            written = {slots[arg] for arg in written_by(node)}
            pairs += [(last[slot], node) for slot in written if slot in last]
    return pairs


def _lasts(node: fx.Node, place: int, places: dict[fx.Node, int]) -> bool:
    """Whether what a node computes is in memory, or used, behind a place."""
    return bool(written_by(node)) or any(places[reader] > place for reader in readers(node))


def _is_library_call(node: fx.Node) -> bool:
    """Whether Inductor calls an operator of a library there, or may: it adds up rows by atomic additions of its own, or
    calls PyTorch's operator where those are missing (in bfloat16 on an A100, say) or not deterministic. What is given
    code to run, a kernel of the program's own, say, counts too."""
    if node.op != "call_function" or is_view(node) or buffer_of(node) is not None:
        return False
    if node.target is torch.ops.aten.index_put_.default or isinstance(node.target, HigherOrderOperator):
        return True
    return isinstance(node.target, OpOverload) and not generates_code_for(node.target)
