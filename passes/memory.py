"""The memory that a final graph needs, from its order alone.

A tensor lives from the node that makes it to the last one that reads it or a view of it, or to the last that stores
what one kernel computes from it. Slots, shards and the optimizer's states live outside the graph and are not counted
here. With Inductor a value that only generated code reads is taken to live in registers, as part of a fused kernel, or
to be computed anew from what is in memory anyway; what an operator of a library reads, or makes, what scatters and
sorts make, what leaves the graph, and what has to outlast an operator of a library, is memory.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from operator import or_

from torch import fx

from ..schemas import is_of_python, is_pointwise, is_view, readers
from ..torch_internals.inductor_graphs import generates_code_for, may_stay_in_registers
from .aliases import bases_of
from .context import CompileContext, Lowering, Part, Use, buffer_of, comm_of, is_allocation
from .edit import nbytes_of, numel_of, order_of
from .moves import buffer_behind
from .summary import Peak

_NAMED = 3  # of the largest at the fullest moment


class GraphMemory:
    """What a graph holds in memory, in the order in which its nodes are when it is asked.

    Launches and waits, and what they need, may be moved between two questions: what does not depend on where they stand
    is found once.

    Attributes:
        graph: whose memory it is.
        bases: the node that made the memory of each node's result; of inputs that lie in one gather's, the first.
    """

    def __init__(self, graph: fx.Graph, context: CompileContext, part: Part) -> None:
        self.graph, self._context, self._part = graph, context, part
        kept = _kept(graph, context) if part is Part.BACKWARD else {}
        self._whole = {each[0]: context.units[unit].numel * each[0].meta["val"].itemsize for unit, each in kept.items()}
        first = {view: each[0] for each in kept.values() for view in each}
        self.bases = {node: first.get(base, base) for node, base in bases_of(graph).items()}
        values = dict.fromkeys(self.bases.values())
        self._held = {node for node in values if _is_memory(node, context)}
        self._in_memory = {
            each for each in values if each in self._held or each.op == "placeholder" or buffer_of(each) is not None
        }
        others = [each for each in values if each not in self._in_memory and nbytes_of(each)]
        self._meeting = _meeting_again(others, graph, self.bases)

    def peak(self, without: Collection[fx.Node] = ()) -> Peak:
        """The graph's fullest moment, ``without`` counting what will lie in slots."""
        spans = self._spans(without)
        levels = self._levels(spans)
        at = levels.index(max(levels))
        held = [node for node, (first, last) in spans.items() if first <= at <= last]
        kinds: Counter[str] = Counter()
        for node in held:
            kinds[_kind(node, self._context)] += self._nbytes(node)
        named = heapq.nlargest(_NAMED, held, key=self._nbytes)
        largest = tuple((_name(node, self._context), self._nbytes(node)) for node in named)
        fullest = list(self.graph.nodes)[at]
        return Peak(fullest.name, kinds["parameters"], kinds["gradients"], kinds["activations"], largest)

    def live_bytes(self, without: Collection[fx.Node]) -> list[int]:
        """What is live while each node runs, ``without`` what will lie in slots."""
        return self._levels(self._spans(without))

    def _nbytes(self, node: fx.Node) -> int:
        return self._whole[node] if node in self._whole else nbytes_of(node)

    def _levels(self, spans: dict[fx.Node, tuple[int, int]]) -> list[int]:
        """What is live while each node runs, in bytes."""
        changes: Counter[int] = Counter()
        for node, (first, last) in spans.items():
            changes[first] += self._nbytes(node)
            changes[last + 1] -= self._nbytes(node)
        return list(itertools.accumulate(changes[place] for place in range(len(self.graph.nodes))))

    def _spans(self, without: Collection[fx.Node]) -> dict[fx.Node, tuple[int, int]]:
        """The first and the last place in the graph's order at which what a node makes is in memory. The forward's
        inputs are its caller's and stay; the backward frees what it was given after its last use."""
        order = order_of(self.graph)
        lasts = _last_uses(self.graph, self.bases, order)
        if self._part is not Part.BACKWARD:
            lasts.update((node, len(order)) for node in lasts if node.op == "placeholder")
        held = self._held | self._outlasting(lasts)
        lasts = _last_reads(self.graph, self._context, held, self.bases, lasts)
        return {node: (order[node], last) for node, last in lasts.items() if node in held and node not in without}

    def _outlasting(self, lasts: dict[fx.Node, int]) -> set[fx.Node]:
        """Values that only generated code reads, but that what an operator of a library makes of them meets again, and
        that are not computed from what is held in memory, or lies in slots and shards, for as long. All are in the
        order of ``lasts``, in which none comes before what it is computed from."""
        sources: dict[fx.Node, set[fx.Node]] = {}  # of a value in memory itself, of others what they are computed from
        found: set[fx.Node] = set()
        for node in lasts:
            read = {self.bases[arg] for arg in node.all_input_nodes} if node not in self._in_memory else ()
            sources[node] = set().union(*(sources[base] for base in read)) if read else {node}
            if node in self._meeting and any(lasts[source] < lasts[node] for source in sources[node]):
                found.add(node)
                sources[node] = {node}
        return found


def left_bytes(graph: fx.Graph, context: CompileContext) -> int:
    """What a final graph leaves in memory, apart from its inputs: results, and what is kept for the backward."""
    bases = bases_of(graph)
    left = {bases[value] for value in graph.output_node().all_input_nodes}
    return sum(nbytes_of(base) for base in left if base.op != "placeholder" and _is_memory(base, context))


def _kept(backward: fx.Graph, context: CompileContext) -> dict[int, list[fx.Node]]:
    """By unit, the inputs that are parameters which the forward has gathered: views of one piece of memory, all of
    which is there while any of them is."""
    found: dict[int, list[fx.Node]] = {}
    for node in backward.find_nodes(op="placeholder"):
        if node.name in context.saved:
            found.setdefault(context.saved[node.name], []).append(node)
    return found


def _last_uses(graph: fx.Graph, bases: dict[fx.Node, fx.Node], order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    last = {base: order[base] for base in bases.values()}
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            last[bases[arg]] = max(last[bases[arg]], order[node])
    return last


def _last_reads(
    graph: fx.Graph,
    context: CompileContext,
    held: set[fx.Node],
    bases: dict[fx.Node, fx.Node],
    lasts: dict[fx.Node, int],
) -> dict[fx.Node, int]:
    """When what is ``held`` in memory is last read, and nothing has taken its place.

    A kernel reads what a value is computed from while it stores the value, whichever node of the graph reads it first;
    what it reduces, it has read by then. Generated code has a value take the place of one of its size that its kernel
    is the last to read, element by element.
    """
    stores = list(_stores(graph, held, bases))
    found = dict(lasts)
    for place, _, read in stores:
        found.update((source, max(found[source], place)) for source in read)
    if context.lowering is not Lowering.INDUCTOR:
        return found
    for place, stored, read in (each for each in stores if each[1] in held):
        nbytes = nbytes_of(stored)
        alike = [each for each, elementwise in read.items() if elementwise and nbytes_of(each) == nbytes]
        ending = (each for each in alike if found[each] == place)
        taken = next((each for each in ending if each.op != "placeholder" or each.name in context.donated), None)
        if taken is not None:
            found[taken] -= 1
    return found


def _stores(
    graph: fx.Graph, held: set[fx.Node], bases: dict[fx.Node, fx.Node]
) -> Iterator[tuple[int, fx.Node, dict[fx.Node, bool]]]:
    """The nodes whose results are ``held`` in memory or written to a slot, and their places. For each, what is held
    that its result is computed from, without what is reduced on the way; and whether element by element."""
    sources: dict[fx.Node, dict[fx.Node, bool]] = {}  # the same, of what lies in no memory
    for place, node in enumerate(graph.nodes):
        if is_view(node):
            continue
        read: dict[fx.Node, bool] = {}
        pointwise = is_pointwise(node.target)
        for base in (bases[arg] for arg in node.all_input_nodes):
            for source, elementwise in ({base: True} if base in held else sources.get(base, {})).items():
                read[source] = read.get(source, True) and elementwise and pointwise
        if bases[node] in held or buffer_of(bases[node]) is not None:
            yield place, node, read
        else:
            numel = numel_of(node)
            sources[node] = {each: alike for each, alike in read.items() if numel_of(each) <= numel}


def _meeting_again(values: Sequence[fx.Node], graph: fx.Graph, bases: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Of ``values`` those that are read together with what an operator of a library has made of them: no kernel can
    contain both readers. Sets of values are numbers, a bit for each."""
    bits = {value: 1 << index for index, value in enumerate(values)}
    fused: dict[fx.Node, int] = {}  # what generated code alone leads to a node from
    through: dict[fx.Node, int] = {}  # what an operator of a library is between
    meeting = 0
    for node in graph.nodes:
        inputs = node.all_input_nodes
        from_fused, from_through = (
            functools.reduce(or_, (each[arg] for arg in inputs), 0) for each in (fused, through)
        )
        meeting |= from_through & functools.reduce(or_, (bits.get(bases[arg], 0) for arg in inputs), 0)
        if _interrupts(node):
            from_fused, from_through = 0, from_through | from_fused
        fused[node], through[node] = from_fused | bits.get(node, 0), from_through
    return {value for value, bit in bits.items() if meeting & bit}


def _interrupts(node: fx.Node) -> bool:
    """Whether no generated kernel contains what is before a node and what is behind it."""
    return node.op == "call_function" and not (
        is_view(node) or is_of_python(node.target) or buffer_of(node) is not None or generates_code_for(node.target)
    )


def _is_memory(node: fx.Node, context: CompileContext) -> bool:
    if node.op == "placeholder":
        in_slot = any(buffer_of(user) is not None for user in node.users)
        is_shard = any(comm_of(user) is not None for user in node.users)
        return not in_slot and not is_shard
    if node.op != "call_function" or not nbytes_of(node):
        return False
    if buffer_of(node) is not None:
        return is_allocation(node)
    return context.lowering is Lowering.EAGER or not _is_fused(node)


def _is_fused(node: fx.Node) -> bool:
    """Unless the output of the graph, or an operator of a library, reads it."""
    return may_stay_in_registers(node.target) and all(generates_code_for(reader.target) for reader in readers(node))


def _name(node: fx.Node, context: CompileContext) -> str:
    mark = buffer_behind(node, context)
    return node.name if mark is None else context.named(mark)


def _kind(node: fx.Node, context: CompileContext) -> str:
    mark = buffer_behind(node, context)
    if mark is None:
        return "activations"
    return "parameters" if mark.use in (Use.PARAMETERS, Use.PACKED) else "gradients"
