"""What no schedule can beat: the lower bound max(compute, host, communication, critical path) on the makespan."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.sums import Joined, Knapsack
from vescale_compile.schedule.tasks import Transfer

_UNLIMITED = 1 << 62

_ByPosition = dict[int, list[Transfer]]


@dataclass(frozen=True)
class Bound:
    """Lower bounds on the makespan of every schedule of a graph within a budget, seconds.

    Attributes:
        compute: all the computation, and what launches and transfers take of the compute device. What repeated
            transfers take is left out.
        host: all that the host has to do, without repeated transfers.
        communication: all that the wire must carry, or other links after it, if that is longer. Repeated transfers are
            left out as far as the budget could at best allow it, and those that may share collectives pay one latency.
        critical_path: the longest chain of what must follow one another: the transfers that a position needs, one
            after another over the wire, or their launches; the computation from there; and the transfers that can't
            be launched before, because nothing has been written to send, or for want of room for what they bring.
    """

    compute: float
    host: float
    communication: float
    critical_path: float

    @property
    def makespan(self) -> float:
        """The largest of the four."""
        return max(self.compute, self.host, self.communication, self.critical_path)


def lower_bound(graph: TaskGraph, budget: int | None = None) -> Bound:
    """Bounds the makespan of all schedules of ``graph`` whose peak memory is at most ``budget`` bytes."""
    room = [(_UNLIMITED if budget is None else budget) - nbytes for nbytes in _held(graph)]
    reached = _reached(graph)
    return Bound(
        compute=graph.elapsed[-1] + _taken(graph),
        host=_issued(graph),
        communication=max(
            _seconds(graph.transfers).seconds - _most_saved(graph, room), _seconds_then(_needed(graph)).seconds
        ),
        critical_path=max(reached[-1], _longest_tail(graph, reached, room)),
    )


def _taken(graph: TaskGraph) -> float:
    """What transfers take of the compute device at least, or of the time in which it waits: their launches, and what
    they load it by, but for what is on the wire meanwhile."""
    launches = loaded = most = 0.0
    for transfer in graph.transfers:
        share = min(1.0, transfer.load * transfer.stretch)
        most = max(most, share)
        if transfer.repeats is None:
            launches += transfer.launch
            loaded += share * transfer.wire_time
    return launches + max(0.0, loaded - launches * most)


def _issued(graph: TaskGraph) -> float:
    """What the host takes at least for everything."""
    return graph.issued[-1] + Joined(attrgetter("issue"), attrgetter("call"), _needed(graph)).seconds + graph.after


def _needed(graph: TaskGraph) -> list[Transfer]:
    """The transfers of every schedule: those that repeat another may be left out."""
    return [transfer for transfer in graph.transfers if transfer.repeats is None]


def _held(graph: TaskGraph) -> list[int]:
    """By position, what every schedule holds while the compute task there runs. Scratch is not among it: a collective
    could be in flight before or after any one task."""
    more = [0] * (len(graph.compute) + 1)  # than at the position before

    def hold(nbytes: int, start: int, stop: int) -> None:
        more[start] += nbytes
        more[stop] -= nbytes

    for transfer in graph.transfers:
        due = len(graph.compute) if transfer.deadline is None else transfer.deadline
        if transfer.writers:
            hold(transfer.input_bytes, min(transfer.writers), transfer.ready)
            hold(min(transfer.input_bytes, transfer.output_bytes), transfer.ready, due)  # sent, or not yet
        if transfer.readers:
            hold(transfer.output_bytes, due, max(transfer.readers) + 1)
    buffers = itertools.accumulate(more)
    return [compute.live_bytes + nbytes for compute, nbytes in zip(graph.compute, buffers, strict=False)]


def _seconds(transfers: Iterable[Transfer]) -> Joined:
    """What transfers take of the wire at least."""
    return Joined(attrgetter("wire_time"), attrgetter("latency"), transfers)


def _seconds_then(transfers: Iterable[Transfer]) -> Joined:
    """What transfers take of other links at least, after the wire."""
    return Joined(attrgetter("then_wire_time"), attrgetter("then_latency"), transfers)


def _reached(graph: TaskGraph) -> list[float]:
    """Seconds before which no schedule reaches each position, and the end; transfers that may be left out apart, and
    calls but for the first one's, which others may share."""
    due: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in graph.transfers:
        if transfer.repeats is None and transfer.deadline is not None:
            due[transfer.deadline].append(transfer)
    reached = [0.0]
    launches = issue = 0.0
    brought = _seconds(())
    first = math.inf  # seconds until the first of them can have been launched
    for position, compute in enumerate(graph.compute):
        for transfer in due[position]:
            launches += transfer.launch
            issue += transfer.issue
            if transfer.ready:
                writer = transfer.ready - 1
                done = reached[writer] + graph.compute[writer].duration + transfer.duration + transfer.then
            else:
                brought.add(transfer)
                first = min(first, graph.before + transfer.call + transfer.issue)
                done = first + brought.seconds
            reached[position] = max(reached[position], done)
        reached[position] = max(reached[position], graph.elapsed[position] + launches, graph.issued[position] + issue)
        reached.append(max(reached[position] + compute.duration, graph.issued[position + 1] + issue))
    return reached


def _most_saved(graph: TaskGraph, room: Sequence[int]) -> float:
    """No less than the seconds of the wire that kept outputs can save.

    At each position the outputs kept for later must fit in the room that is left there. The tightest one counts.
    """
    kept = [transfer for transfer in graph.transfers if transfer.repeats is not None]
    begins, ends = defaultdict(list), defaultdict(list)
    for transfer in kept:
        gap = graph.gap(transfer)
        begins[gap.start].append(transfer)
        ends[gap.stop].append(transfer)
    held = Knapsack(kept)
    saved = total = sum(transfer.duration for transfer in kept)
    for start, stop in itertools.pairwise(sorted({*begins, *ends})):
        for transfer in begins[start]:
            held.add(transfer)
        for transfer in ends[start]:
            held.remove(transfer)
        saved = min(saved, total - (held.most(_UNLIMITED) - held.most(min(room[start:stop]))))
    return saved


def _longest_tail(graph: TaskGraph, reached: Sequence[float], room: Sequence[int]) -> float:
    """The latest end of what the wire can only carry after some compute task.

    That is what is written by that task or later, and what is read later and was not there during the task; what
    was must have fitted in the room that was left. Or it is what other links can only carry then, after the wire.
    """
    written, awaited, read_before = _by_last_position(graph)
    carried, carried_then = _seconds(()), _seconds_then(())
    there = Knapsack(itertools.chain.from_iterable(awaited.values()))
    longest, shortest = 0.0, math.inf  # the shortest on the wire of what other links carry on
    for position in reversed(range(len(graph.compute))):
        for transfer in awaited[position]:
            carried.add(transfer)
            there.add(transfer)
        for transfer in read_before[position]:
            carried.remove(transfer)
            there.remove(transfer)
        for transfer in written[position]:
            carried.add(transfer)
            if transfer.then:
                carried_then.add(transfer)
                shortest = min(shortest, transfer.duration)
        if written[position]:
            end = reached[position] + graph.compute[position].duration
            longest = max(longest, end + carried.seconds - there.most(room[position]))
            if shortest < math.inf:
                longest = max(longest, end + shortest + carried_then.seconds)
    return longest


def _by_last_position(graph: TaskGraph) -> tuple[_ByPosition, _ByPosition, _ByPosition]:
    """Transfers by the last position that writes what they send; those that send nothing of the graph's, by the last
    one before what they bring is read; and of those, the ones that repeat others, by the last position that reads it
    from the other: up to there it takes no room beside."""
    written, awaited, read_before = defaultdict(list), defaultdict(list), defaultdict(list)
    for transfer in graph.transfers:
        if transfer.ready:
            written[transfer.ready - 1].append(transfer)
            continue
        awaited[min(transfer.readers) - 1].append(transfer)
        if transfer.repeats is not None:
            read_before[graph.gap(transfer).start - 1].append(transfer)
    return written, awaited, read_before
