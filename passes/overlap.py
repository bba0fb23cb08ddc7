"""Moves launches and waits so that collectives run beside computation, as the cost model predicts it.

The graph's computation keeps its order and is cut into segments, at the nodes where a unit's parameters are first or
last read and its gradients first or last written. Each segment has a time and the memory that is live in it; each
collective has a time, its readers and its writers. :func:`vescale_compile.schedule.find_schedule` places the launches
and waits with the least exposed communication within the memory budget, and the graph's nodes are moved to match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx
from torch._ops import OpOverload

from ..cost import collective_cost
from ..cost.collectives import ALL_TO_ALL
from ..cost.compute import compute_seconds
from ..runtime.pool import pooled_bytes
from ..runtime.quantized_ops import start_reduce_scatter_quantized
from ..schedule import (
    BudgetError,
    Compute,
    Launch,
    Run,
    Schedule,
    TaskGraph,
    Transfer,
    find_schedule,
    least_peak,
)
from ..torch_internals import generates_code_for
from .aliases import bases_of, is_view, touches_of
from .assign import lifetimes, slots_for
from .context import ALL_GATHER, CompileContext, Lowering, Role, Use, buffer_of, comm_of, fail, marked_buffer
from .edit import nbytes_of, order_of
from .expand import CASTS
from .memory import peak_of

_ATTEMPTS = 6  # at a schedule whose slots fit in the memory budget


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        kind, unit: as of its nodes' marks.
        launch, wait: its nodes.
        buffers: what the launch takes that must exist before it.
        touched: computation that reads the gathered parameters, or writes the gradients, in order.
        escapes: whether the gathered parameters are kept for the backward.
        casts: of a reduction's result, right behind its wait.
    """

    kind: str
    unit: int
    launch: fx.Node
    wait: fx.Node
    buffers: tuple[fx.Node, ...]
    touched: tuple[fx.Node, ...]
    escapes: bool
    casts: tuple[fx.Node, ...]

    @property
    def gathers(self) -> bool:
        return self.kind == ALL_GATHER


def overlap(gm: fx.GraphModule, context: CompileContext) -> None:
    assert context.part is not None
    collectives = collectives_of(gm.graph)
    segments = _segments(gm.graph, collectives)
    if not collectives or not segments:
        return
    tasks = _task_graph(gm.graph, context, collectives, segments)
    _schedule(tasks, gm.graph, context, collectives, segments)


def _schedule(
    tasks: TaskGraph,
    graph: fx.Graph,
    context: CompileContext,
    collectives: Sequence[Collective],
    segments: Sequence[list[fx.Node]],
) -> None:
    """Finds the schedule and moves the graph's nodes to match. Slots are never as full as they are large, and other
    graphs' slots are there too: while all together exceed the budget, the schedule gets less."""
    least = least_peak(tasks)
    budget = context.memory_budget
    if budget is None:
        budget = least + _room(tasks)
    limit = budget
    for _ in range(_ATTEMPTS):
        try:
            found = find_schedule(tasks, limit)
        except BudgetError as error:
            assert context.part is not None
            fail(context, None, f"{context.part.value}: {error}")
        _move(graph, found.schedule, collectives, segments)
        excess = _planned_bytes(graph, context) - budget
        if excess <= 0 or limit == least:
            return
        limit = max(min(limit, found.timeline.peak_bytes) - excess, least)


def _planned_bytes(graph: fx.Graph, context: CompileContext) -> int:
    """What a step will take: slots of this graph and of those before it, and the fullest moment of any."""
    buffers = lifetimes(graph)
    peaks = [summary.peak.nbytes for summary in context.summaries.values()]
    slots = [*context.slots.values(), slots_for(buffers)]
    own = peak_of(graph, context, {buffer.node for buffer in buffers})
    return _shard_bytes(context) + pooled_bytes(slots) + max([own.nbytes, *peaks])


def _shard_bytes(context: CompileContext) -> int:
    return sum(unit.shard_bytes for unit in context.units)


def _room(tasks: TaskGraph) -> int:
    """What overlap may take where no budget is given: one unit's parameters, and one unit's gradients, more than a
    schedule that waits for everything at once. It is what gathering one unit ahead takes."""
    return max(t.output_bytes for t in tasks.transfers) + max(t.input_bytes for t in tasks.transfers)


def collectives_of(graph: fx.Graph) -> list[Collective]:
    """The collectives of a graph, in the order of their launches."""
    touched = touches_of(graph, bases_of(graph))
    waits = {
        (comm.kind, comm.unit): node
        for node in graph.nodes
        if (comm := comm_of(node)) is not None and comm.role is Role.WAIT
    }
    found = []
    for node in graph.nodes:
        comm = comm_of(node)
        if comm is None or comm.role is Role.WAIT:
            continue
        buffers = [arg for arg in node.all_input_nodes if buffer_of(arg) is not None]
        nodes = [each for each in touched[buffers[0]] if comm_of(each) is None]
        reduced = [user for buffer in buffers[1:] for user in touched[buffer]]
        found.append(
            Collective(
                comm.kind,
                comm.unit,
                node,
                waits[comm.kind, comm.unit],
                tuple(buffers),
                tuple(each for each in nodes if each.op != "output"),
                any(each.op == "output" for each in nodes),
                tuple(user for user in reduced if user.target in CASTS),
            )
        )
    return found


def _segments(graph: fx.Graph, collectives: Sequence[Collective]) -> list[list[fx.Node]]:
    """The computation, cut before the first and after the last node that touches a collective's buffer."""
    casts = {cast for each in collectives for cast in each.casts}
    firsts = {each.touched[0] for each in collectives if each.touched}
    lasts = {each.touched[-1] for each in collectives if each.touched}
    segments: list[list[fx.Node]] = []
    ended = True
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node) or _is_communication(node):
            continue
        if node in casts:
            continue
        if ended or node in firsts:
            segments.append([])
        segments[-1].append(node)
        ended = node in lasts
    return segments


def _is_communication(node: fx.Node) -> bool:
    return comm_of(node) is not None or buffer_of(node) is not None


def _task_graph(
    graph: fx.Graph, context: CompileContext, collectives: Sequence[Collective], segments: Sequence[list[fx.Node]]
) -> TaskGraph:
    seconds = compute_seconds(graph.nodes, context.cluster.device, fused=context.lowering is Lowering.INDUCTOR)
    # Slots are there all the time, so what they may take is what the fullest moment leaves.
    live = peak_of(graph, context, {lifetime.node for lifetime in lifetimes(graph)}).nbytes
    shards = _shard_bytes(context)
    held = _unpacked_bytes(graph, collectives, segments)
    compute = [
        Compute(segment[0].name, sum(seconds[node] for node in segment), shards + live + unpacked)
        for segment, unpacked in zip(segments, held, strict=True)
    ]
    place = {node: number for number, segment in enumerate(segments) for node in segment}
    transfers = [_transfer(each, context, place, len(segments)) for each in collectives]
    return TaskGraph(tuple(compute), tuple(transfers))


def _unpacked_bytes(graph: fx.Graph, collectives: Sequence[Collective], segments: Sequence[list[fx.Node]]) -> list[int]:
    """In each segment, the memory of parameters that are computed from what was gathered."""
    carried = {buffer for each in collectives for buffer in each.buffers}
    unpacked = [buffer for buffer in lifetimes(graph) if buffer.node not in carried]
    order = order_of(graph)
    return [
        sum(
            nbytes_of(buffer.node)
            for buffer in unpacked
            if buffer.first <= order[segment[-1]] and buffer.last >= order[segment[0]]
        )
        for segment in segments
    ]


def _transfer(each: Collective, context: CompileContext, place: dict[fx.Node, int], segments: int) -> Transfer:
    full = nbytes_of(each.buffers[0])
    scratch = sum(nbytes_of(buffer) for buffer in each.buffers[1:] if marked_buffer(buffer).use is Use.SCRATCH)
    exchanges = each.launch.target is start_reduce_scatter_quantized
    if exchanges:  # codes of the gradients, from one scratch buffer to the other
        full, scratch = scratch // 2, full + scratch // 2
    cost = collective_cost(context.cluster, ALL_TO_ALL if exchanges else each.kind, full)
    touched = tuple(sorted({place[node] for node in each.touched}))
    return Transfer(
        f"{each.kind} of {context.units[each.unit].name}",
        cost.latency,
        cost.wire_time,
        writers=() if each.gathers else touched or (0,),
        readers=(touched or (segments - 1,)) if each.gathers else (),
        input_bytes=0 if each.gathers else full + scratch,
        output_bytes=full if each.gathers and not each.escapes else 0,
        lane=each.kind,
        load=cost.load,
    )


def _move(
    graph: fx.Graph, schedule: Schedule, collectives: Sequence[Collective], segments: Sequence[list[fx.Node]]
) -> None:
    """Puts launches and waits where the schedule has them, and the buffers before their launches."""
    output = next(iter(reversed(graph.nodes)))
    after = segments[0][0]
    order = order_of(graph)
    for instruction in schedule.instructions:
        if isinstance(instruction, Run):
            following = instruction.position + 1
            after = segments[following][0] if following < len(segments) else output
            continue
        for index in instruction.transfers:
            each = collectives[index]
            if isinstance(instruction, Launch):
                for buffer in each.buffers:
                    if order[buffer] > order[after]:
                        after.prepend(buffer)
                after.prepend(each.launch)
            else:
                after.prepend(each.wait)
                for cast in each.casts:
                    after.prepend(cast)


def ordered_nodes(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes whose order lowering must keep, to keep the schedule: each launch and wait after what comes
    before it, and before what comes after it, of the collectives and of the operators that libraries run.

    Generated kernels go where what they read and write lets them.
    """
    kept = [node for node in graph.nodes if comm_of(node) is not None or _is_library_call(node)]
    pairs = [(a, b) for a, b in pairwise(kept) if comm_of(a) is not None or comm_of(b) is not None]
    if kept and comm_of(kept[0]) is not None:
        pairs.insert(0, (kept[0].all_input_nodes[0], kept[0]))
    return pairs


def _is_library_call(node: fx.Node) -> bool:
    if node.op != "call_function" or is_view(node) or buffer_of(node) is not None:
        return False
    return isinstance(node.target, OpOverload) and not generates_code_for(node.target)
