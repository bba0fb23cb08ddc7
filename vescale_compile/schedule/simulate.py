"""What a schedule would do: when everything runs, what is exposed, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine, ScheduleError
from vescale_compile.schedule.program import Schedule


@dataclass(frozen=True)
class TransferSpan:
    """One collective's life, in seconds from the start of the step.

    Attributes:
        transfers: indices in the graph.
        launched: when the program launched it; it may have queued behind others of its lane.
        start, stop: when it was on the wire.
        stall: how long the computation stood still in its wait.
    """

    transfers: tuple[int, ...]
    launched: float
    start: float
    stop: float
    stall: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. ``makespan = compute + exposed + slowdown``; times in seconds, memory in bytes.

    Attributes:
        makespan: until everything is done and waited for.
        compute: sum of the compute tasks' durations.
        exposed: time in which the computation stands still and waits.
        slowdown: time that the computation lost to launches, and to transfers that load the compute device.
        communication: sum of the transfers' durations, each with the wire to itself.
        peak_bytes: the most memory live at any instruction.
        runs: start and stop of each compute task.
        transfers: in launch order.
        tail: time at the end in which nothing is left to compute or to launch.
        most_in_flight: the most collectives launched and not waited for at a time.
    """

    makespan: float
    compute: float
    exposed: float
    slowdown: float
    communication: float
    peak_bytes: int
    runs: tuple[tuple[float, float], ...]
    transfers: tuple[TransferSpan, ...]
    tail: float
    most_in_flight: int

    @property
    def hidden(self) -> float:
        """Share of the time during which a transfer was on the wire in which the computation did not wait."""
        busy = _covered((span.start, span.stop) for span in self.transfers)
        return 1 - self.exposed / busy if busy else 1.0


def simulate(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """Runs ``schedule`` on the machine of :mod:`.machine`.

    Raises:
        ScheduleError: the schedule breaks a rule of the graph; the message names the task.
    """
    machine = Machine(Lifetimes(graph, schedule.kept))
    most = 0
    for instruction in schedule.instructions:
        machine.execute(instruction)
        most = max(most, len(machine.outstanding))
    return timeline(machine, most)


def timeline(machine: Machine, most_in_flight: int) -> Timeline:
    """The record of a machine that has run a whole program."""
    graph, kept = machine.graph, machine.lifetimes.kept
    if machine.position < len(graph.compute):
        raise ScheduleError(f"the program ends before {graph.compute[machine.position].name!r} has run")
    for index, transfer in enumerate(graph.transfers):
        if index not in machine.done and index not in kept:
            raise ScheduleError(f"the program ends without a wait for {transfer.name!r}")
    spans = []
    communication = 0.0
    for item in machine.collectives:
        assert item.started is not None and item.stopped is not None
        parts = [graph.transfers[index] for index in item.transfers]
        communication += max(part.latency for part in parts) + sum(part.wire_time for part in parts)
        stall = machine.stalls.get(item.transfers, 0.0)
        spans.append(TransferSpan(item.transfers, item.launched, item.started, item.stopped, stall))
    compute = graph.elapsed[-1]
    exposed = sum(machine.stalls.values())
    return Timeline(
        makespan=machine.now,
        compute=compute,
        exposed=exposed,
        slowdown=max(0.0, machine.now - compute - exposed),
        communication=communication,
        peak_bytes=machine.peak,
        runs=tuple(machine.runs),
        transfers=tuple(spans),
        tail=machine.now - machine.busy_until,
        most_in_flight=most_in_flight,
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
