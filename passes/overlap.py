"""Moves launches and waits so that collectives run beside computation, as the cost model predicts it.

:func:`vescale_compile.schedule.find_schedule` places the launches and waits of the graph's task graph with the least
exposed communication within the memory budget, and the graph's nodes are moved to match. The budget is the step's: what
the other graphs of the step take, of slots and of everything else, is counted with this one's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from ..runtime.pool import SlotSpec, pooled_bytes
from ..schedule import (
    Bound,
    BudgetError,
    Launch,
    Run,
    Schedule,
    Scheduled,
    ScheduleError,
    TaskGraph,
    check_budget,
    launched_early,
    least_peak,
    lower_bound,
    simulate,
    synchronous_schedule,
)
from ..schemas import is_view, readers
from .agreed import Agreed, agreed_schedule
from .assign import lifetimes, slots_for
from .context import CompileContext, Need, Role, buffer_of, comm_of, fail
from .edit import order_of
from .fitting import Fitting
from .memory import GraphMemory
from .prediction import predict
from .tasks import Collective, collectives_of, one_task, segments_of, task_graph

_NAMED = 3  # units that a message has the names of
_OURS = 0.9  # of a device's memory: the rest is the allocator's, and of libraries


def overlap(gm: fx.GraphModule, context: CompileContext) -> None:
    assert context.part is not None
    _place_carried(gm.graph)
    collectives = collectives_of(gm.graph)
    segments = segments_of(gm.graph, context, collectives)
    if not collectives or not segments:
        tasks = one_task(gm.graph, context, context.part)
        context.predictions[context.part] = predict(tasks, synchronous_schedule(tasks).timeline, *_bounds(tasks, ()))
        return
    memory = GraphMemory(gm.graph, context, context.part)
    others = [need for part, need in context.needs.items() if part is not context.part]
    # Slots are there all the time, so what they may take is what the fullest moment of the step leaves.
    fullest = max([_taken(memory)[1], *(other.peak for other in others)])
    apart = context.standing_bytes + fullest
    tasks = task_graph(gm.graph, context, collectives, segments, apart, context.part)
    found = _schedule(tasks, memory, context, collectives, segments, others, apart)
    agreed, timeline = agreed_schedule(found.schedule, tasks, collectives, context), found.timeline
    try:
        schedule = agreed.of(tasks)
    except ScheduleError:  # of generated kernels that do at once what others do one after another
        segments = segments_of(gm.graph, context, collectives, fuse=False)
        tasks = task_graph(gm.graph, context, collectives, segments, apart, context.part)
        schedule = _of_finest(agreed, tasks, context)
    if schedule != found.schedule:
        _move(gm.graph, schedule, collectives, segments)
        _place_carried(gm.graph)
        timeline = simulate(tasks, schedule)
    _put_views_behind_waits(gm.graph, collectives)
    context.predictions[context.part] = predict(tasks, timeline, *_bounds(tasks, collectives))
    context.needs[context.part] = Need(*_taken(memory), least_peak(tasks) + room_ahead(tasks))


def _of_finest(agreed: Agreed, tasks: TaskGraph, context: CompileContext) -> Schedule:
    try:
        return agreed.of(tasks)
    except ScheduleError as error:
        assert context.part is not None
        fail(
            context,
            None,
            f"{context.part.value}: collectives can't be brought into the order that the first rank has decided: "
            f"{error}. Give every rank batches of one kind, and of some size",
        )


def _bounds(tasks: TaskGraph, collectives: Sequence[Collective]) -> tuple[Bound, Bound]:
    """What no schedule can beat, in whatever memory: what the forward has launched may be over by now. And what none
    could beat if the host had done everything before."""
    launched_here = zip(tasks.transfers, collectives, strict=True)
    own = tuple(transfer for transfer, each in launched_here if each.launch is not each.wait)
    tasks = replace(tasks, transfers=own)
    return lower_bound(tasks), lower_bound(tasks.fed())


def _schedule(
    tasks: TaskGraph,
    memory: GraphMemory,
    context: CompileContext,
    collectives: Sequence[Collective],
    segments: Sequence[list[fx.Node]],
    others: Sequence[Need],
    apart: int,
) -> Scheduled:
    """Finds the schedule and moves the graph's nodes to match. Free memory between slots may be in pieces: what fits as
    bytes but not as slots may fit if nothing overlaps, or if launches are not as early as can be. Where graphs take
    turns, bytes are those of a step with the slots of one turn; ``apart`` of them are outside of slots."""
    assert context.part is not None
    least = least_peak(tasks)
    budget = context.room(max([least + room_ahead(tasks), *(other.allowance for other in others)]), apart)

    def planned_with(found: Scheduled) -> int:
        _move(memory.graph, found.schedule, collectives, segments)
        _place_carried(memory.graph)
        return _planned_bytes(memory, context, others)

    fitting = Fitting(tasks, budget, least, planned_with)
    if context.memory_budget is None:
        found, planned = fitting.worth_most(_device_leaves(context))
    else:
        found, planned = fitting.fastest()
        if planned > context.budget_of_a_turn(apart):
            found = synchronous_schedule(tasks)
            planned = planned_with(found)
        if planned > context.budget_of_a_turn(apart):
            _refuse(tasks, planned + (context.turns - 1) * (planned - apart), context)
    early = launched_early(tasks, found)
    if planned_with(early) <= planned:
        return early
    planned_with(found)
    return found


def _device_leaves(context: CompileContext) -> float:
    """Bytes that a step may take on a device beside an optimizer's states."""
    capacity = context.cluster.device.memory_bytes
    return math.inf if capacity is None else _OURS * capacity - context.state_bytes


def _refuse(tasks: TaskGraph, planned: int, context: CompileContext) -> None:
    """Fails with the bytes ``planned`` for a step whose graph overlaps nothing, and what is largest in the graph."""
    assert context.part is not None and context.memory_budget is not None
    try:
        check_budget(tasks, context.memory_budget, planned)
    except BudgetError as error:
        fail(context, None, f"{context.part.value}: {error}. {largest_first(context)}")


def largest_first(context: CompileContext) -> str:
    """Ends a message on a step that takes too much: other batches may have decided what is kept in it."""
    if not context.imposed:
        return "Where batches differ in size, begin with the largest: what the first keeps for the backward, all keep"
    names = [context.units[unit].name for unit in sorted(context.imposed)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        "Or begin with the largest batch, on all ranks: the first to be compiled has decided for all that "
        f"{', '.join(names[:_NAMED])}{more} are kept for the backward, for which this one leaves no room"
    )


def _put_views_behind_waits(graph: fx.Graph, collectives: Sequence[Collective]) -> None:
    """Has views of what is gathered come after it, too: where Inductor wants one in another layout, as it does weights
    of convolutions that the backward reads, it copies it where the view stands."""
    order = order_of(graph)  # as it was will do: the views of one buffer are moved once
    for each in collectives:
        if each.gathers:
            for view in reversed(list(_views_of(each.buffers[0]))):
                if order[view] < order[each.wait] < min((order[reader] for reader in readers(view)), default=math.inf):
                    each.wait.append(view)


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Views of a node's memory, each before the views of itself."""
    for user in node.users:
        if is_view(user):
            yield user
            yield from _views_of(user)


def _place_carried(graph: fx.Graph) -> None:
    """Has what crosses to the backward launched when the forward's own gathers are over, while the last units and the
    loss are computed."""
    marked = [(node, comm) for node in graph.nodes if (comm := comm_of(node)) is not None]
    waits = [node for node, comm in marked if comm.role is Role.WAIT]
    for node, comm in marked:
        if comm.role is Role.CARRY and waits:
            buffer = next(arg for arg in node.all_input_nodes if buffer_of(arg) is not None)
            waits[-1].append(buffer)
            buffer.append(node)


def _planned_bytes(memory: GraphMemory, context: CompileContext, others: Sequence[Need]) -> int:
    """What a step will take: slots of its graphs, the fullest moment of any, and what there is all the time."""
    slots, peak = _taken(memory)
    pooled = pooled_bytes([*(other.slots for other in others), slots])
    fullest = max([peak, *(other.peak for other in others)])
    return context.standing_bytes + pooled + fullest


def _taken(memory: GraphMemory) -> tuple[tuple[SlotSpec, ...], int]:
    """The graph's slots, and the bytes of its fullest moment outside them."""
    buffers = lifetimes(memory.graph, memory.bases)
    return slots_for(buffers), memory.peak({buffer.node for buffer in buffers}).nbytes


def room_ahead(tasks: TaskGraph) -> int:
    """Bytes that gathering one unit ahead, and reducing it while the next is computed, takes more than a schedule that
    waits for everything at once: one unit's parameters, and one unit's gradients with the scratch of their reduction,
    of all parts that a unit is cut into."""
    gathered: Counter[str] = Counter()
    reduced: Counter[str] = Counter()
    for each in tasks.transfers:
        gathered[each.block or each.name] += each.output_bytes
        reduced[each.block or each.name] += each.input_bytes + each.scratch_bytes
    return max(gathered.values()) + max(reduced.values())


def _move(
    graph: fx.Graph, schedule: Schedule, collectives: Sequence[Collective], segments: Sequence[list[fx.Node]]
) -> None:
    """Puts launches and waits where the schedule has them, and the buffers before their launches. Launches that share a
    collective follow one another."""
    output = graph.output_node()
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
                each.launch.kwargs = {"with_next": True} if index != instruction.transfers[-1] else {}
            else:
                after.prepend(each.wait)
                for cast in each.casts:
                    after.prepend(cast)
