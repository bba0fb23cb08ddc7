"""What no schedule can beat: the lower bound max(compute, host, communication, critical path) on the makespan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from vescale_compile.schedule.graph import TaskGraph, Transfer, issue_together

_UNLIMITED = 1 << 62


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
        communication=max(_seconds(graph.transfers) - _most_saved(graph, room), _seconds_then(_needed(graph))),
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
    return graph.issued[-1] + _joined(_needed(graph), attrgetter("issue"), attrgetter("call")) + graph.after


def _needed(graph: TaskGraph) -> list[Transfer]:
    """The transfers of every schedule: those that repeat another may be left out."""
    return [transfer for transfer in graph.transfers if transfer.repeats is None]


def _held(graph: TaskGraph) -> list[int]:
    """By position, what every schedule holds while the compute task there runs. Scratch is not among it: a collective
    could be in flight before or after any one task."""
    held = [compute.live_bytes for compute in graph.compute]

    def hold(nbytes: int, start: int, stop: int) -> None:
        for position in range(start, stop):
            held[position] += nbytes

    for transfer in graph.transfers:
        due = len(graph.compute) if transfer.deadline is None else transfer.deadline
        if transfer.writers:
            hold(transfer.input_bytes, min(transfer.writers), transfer.ready)
            hold(min(transfer.input_bytes, transfer.output_bytes), transfer.ready, due)  # sent, or not yet
        if transfer.readers:
            hold(transfer.output_bytes, due, max(transfer.readers) + 1)
    return held


def _seconds(transfers: Iterable[Transfer]) -> float:
    """What transfers take of the wire at least."""
    return _joined(transfers, attrgetter("wire_time"), attrgetter("latency"))


def _seconds_then(transfers: Iterable[Transfer]) -> float:
    """What transfers take of other links at least, after the wire."""
    return _joined(transfers, attrgetter("then_wire_time"), attrgetter("then_latency"))


def _joined(
    transfers: Iterable[Transfer], each: Callable[[Transfer], float], once: Callable[[Transfer], float]
) -> float:
    """What transfers take at least that each takes, and a collective once: mergeable ones could all share one."""
    total, shared = 0.0, defaultdict(list)
    for transfer in transfers:
        if transfer.merge is None:
            total += each(transfer) + once(transfer)
        else:
            total += each(transfer)
            shared[transfer.merge, transfer.lane].append(once(transfer))
    return total + sum(map(max, shared.values()))


def _reached(graph: TaskGraph) -> list[float]:
    """Seconds before which no schedule reaches each position, and the end; transfers that may be left out apart, and
    calls but for the first one's, which others may share."""
    due: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in graph.transfers:
        if transfer.repeats is None and transfer.deadline is not None:
            due[transfer.deadline].append(transfer)
    reached = [0.0]
    launches = issue = 0.0
    brought: list[Transfer] = []
    first = math.inf  # seconds until the first of them can have been launched
    for position, compute in enumerate(graph.compute):
        for transfer in due[position]:
            launches += transfer.launch
            issue += transfer.issue
            if transfer.ready:
                writer = transfer.ready - 1
                done = reached[writer] + graph.compute[writer].duration + transfer.duration + transfer.then
            else:
                brought.append(transfer)
                first = min(first, graph.before + issue_together([transfer]))
                done = first + _seconds(brought)
            reached[position] = max(reached[position], done)
        reached[position] = max(reached[position], graph.elapsed[position] + launches, graph.issued[position] + issue)
        reached.append(max(reached[position] + compute.duration, graph.issued[position + 1] + issue))
    return reached


def _most_saved(graph: TaskGraph, room: Sequence[int]) -> float:
    """No less than the seconds of the wire that kept outputs can save.

    At each position the outputs kept for later must fit in the room that is left there. The tightest one counts.
    """
    gaps = [(transfer, graph.gap(transfer)) for transfer in graph.transfers if transfer.repeats is not None]
    edges = sorted({edge for _, gap in gaps for edge in (gap.start, gap.stop)})
    saved = total = sum(transfer.duration for transfer, _ in gaps)
    for start, stop in pairwise(edges):
        left = min(room[start:stop])
        held = [transfer for transfer, gap in gaps if start in gap]
        if held and sum(transfer.output_bytes for transfer in held) > left:
            saved = min(saved, total - sum(transfer.duration for transfer in held) + _knapsack(held, left))
    return saved


def _longest_tail(graph: TaskGraph, reached: Sequence[float], room: Sequence[int]) -> float:
    """The latest end of what the wire can only carry after some compute task.

    That is what is written by that task or later, and what is read later and was not there during the task; what
    was must have fitted in the room that was left. Or it is what other links can only carry then, after the wire.
    """
    longest = 0.0
    for position in sorted({transfer.ready - 1 for transfer in graph.transfers if transfer.ready}):
        written = [each for each in graph.transfers if each.ready > position]
        awaited = [each for each in graph.transfers if not each.ready and _awaited(graph, each, position)]
        end = reached[position] + graph.compute[position].duration
        longest = max(longest, end + _seconds([*written, *awaited]) - _knapsack(awaited, room[position]))
        if averaged := [each for each in written if each.then]:
            longest = max(longest, end + min(each.duration for each in averaged) + _seconds_then(averaged))
    return longest


def _awaited(graph: TaskGraph, transfer: Transfer, position: int) -> bool:
    """Whether the output is read after ``position`` only, and takes room if it is there already."""
    if transfer.repeats is not None:
        return position in graph.gap(transfer)
    return position < min(transfer.readers)


def _knapsack(transfers: Iterable[Transfer], room: int) -> float:
    """The most seconds of transfers, parts of them included, whose outputs fit in ``room`` bytes."""
    seconds, left = 0.0, float(max(0, room))
    for transfer in sorted(transfers, key=lambda each: each.output_bytes / (each.duration or 1e-300)):
        share = min(1.0, left / transfer.output_bytes) if transfer.output_bytes else 1.0
        seconds += share * transfer.duration
        left -= share * transfer.output_bytes
    return seconds
