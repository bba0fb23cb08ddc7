"""The memory that a final graph needs, from its order alone.

A tensor lives from the node that makes it to the last one that reads it or a view of it. Slots, shards and the
optimizer's states live outside the graph and are not counted here. With Inductor a value that only generated code
reads is taken to live in registers, as part of a fused kernel; what an operator of a library reads, or makes, and what
leaves the graph, is memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from torch import fx

from ..torch_internals import generates_code_for
from .aliases import bases_of, is_view
from .context import CompileContext, Lowering, Part, Use, buffer_of, comm_of
from .edit import nbytes_of, order_of
from .summary import Peak


def peak_of(graph: fx.Graph, context: CompileContext, without: Collection[fx.Node] = ()) -> Peak:
    """The graph's fullest moment, ``without`` counting what will lie in slots."""
    fullest = Peak("nothing")
    assert context.part is not None
    for node, live in _live(graph, context, context.part, without):
        if live.total() > fullest.nbytes:
            fullest = Peak(node.name, **live)
    return fullest


def live_bytes(graph: fx.Graph, context: CompileContext, part: Part, without: Collection[fx.Node]) -> list[int]:
    """What is live while each node runs, ``without`` what will lie in slots."""
    return [live.total() for _, live in _live(graph, context, part, without)]


def left_bytes(graph: fx.Graph, context: CompileContext) -> int:
    """What a final graph leaves in memory, apart from its inputs: results, and what is kept for the backward."""
    bases = bases_of(graph)
    left = {bases[value] for value in graph.output_node().all_input_nodes}
    return sum(nbytes_of(base) for base in left if base.op != "placeholder" and _is_memory(base, context))


def _live(
    graph: fx.Graph, context: CompileContext, part: Part, without: Collection[fx.Node]
) -> Iterator[tuple[fx.Node, Counter[str]]]:
    """What is live while each node runs, in bytes by kind. The forward's inputs are its caller's and stay; the
    backward frees what it was given after its last use."""
    order, bases = order_of(graph), bases_of(graph)
    births: dict[int, list[fx.Node]] = {}
    deaths: dict[int, list[fx.Node]] = {}
    for node, last in _last_uses(graph, bases, order).items():
        if node not in without and _is_memory(node, context):
            keeps = node.op == "placeholder" and part is not Part.BACKWARD
            births.setdefault(order[node], []).append(node)
            deaths.setdefault(len(order) if keeps else last, []).append(node)
    live: Counter[str] = Counter()
    for node, place in order.items():
        for born in births.get(place, ()):
            live[_kind(born)] += nbytes_of(born)
        yield node, live
        for dead in deaths.get(place, ()):
            live[_kind(dead)] -= nbytes_of(dead)


def _last_uses(graph: fx.Graph, bases: dict[fx.Node, fx.Node], order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    last = {base: order[base] for base in bases.values()}
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            last[bases[arg]] = max(last[bases[arg]], order[node])
    return last


def _is_memory(node: fx.Node, context: CompileContext) -> bool:
    if node.op == "placeholder":
        in_slot = any(buffer_of(user) is not None for user in node.users)
        is_shard = any(comm_of(user) is not None for user in node.users)
        return not in_slot and not is_shard
    if node.op != "call_function" or not nbytes_of(node):
        return False
    if buffer_of(node) is not None:
        return not node.all_input_nodes  # else it lies in a slot
    return context.lowering is Lowering.EAGER or not _is_fused(node)


def _is_fused(node: fx.Node) -> bool:
    if not generates_code_for(node.target):
        return False
    readers = list(node.users)
    while readers:
        reader = readers.pop()
        if is_view(reader):
            readers.extend(reader.users)
        elif not generates_code_for(reader.target):
            return False  # the output of the graph, or an operator of a library
    return True


def _kind(node: fx.Node) -> str:
    mark = buffer_of(node)
    if mark is None:
        return "activations"
    return "parameters" if mark.use in (Use.PARAMETERS, Use.PACKED) else "gradients"
