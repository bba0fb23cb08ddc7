"""What a schedule would do: when everything runs, what is exposed, and how much memory it takes."""

from __future__ import annotations

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
        start, stop: when it was on the wire, or other links after it.
    """

    transfers: tuple[int, ...]
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step, ``makespan = compute + exposed + starved + slowdown``. Times in seconds, memory in bytes.

    Attributes:
        makespan: until everything is done and waited for.
        compute: sum of the compute tasks' durations.
        exposed: time in which the computation stands still and waits.
        starved: time in which the computation stands still until the host has launched what is next, or is done.
        issued: until the host is done.
        slowdown: time that the computation lost to launches, and to transfers that load the compute device.
        communication: sum of the transfers' durations, each with the wire to itself, and of what they take after it.
        peak_bytes: the most memory live at any instruction; of memories that are apart, each at its fullest.
        runs: start and stop of each compute task.
        transfers: in launch order.
        tail: time at the end of the transfers in which nothing is left to compute or to launch.
    """

    makespan: float
    compute: float
    exposed: float
    starved: float
    slowdown: float
    communication: float
    peak_bytes: int
    runs: tuple[tuple[float, float], ...]
    transfers: tuple[TransferSpan, ...]
    tail: float
    issued: float


def simulate(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """Runs ``schedule`` on the machine of :mod:`.machine`.

    Raises:
        ScheduleError: the schedule breaks a rule of the graph; the message names the task.
    """
    machine = Machine(Lifetimes(graph, schedule.kept))
    for instruction in schedule.instructions:
        machine.execute(instruction)
    if machine.position < len(graph.compute):
        raise ScheduleError(f"the program ends before {graph.compute[machine.position].name!r} has run")
    for index, transfer in enumerate(graph.transfers):
        if index not in machine.done and index not in schedule.kept:
            raise ScheduleError(f"the program ends without a wait for {transfer.name!r}")
    spans = []
    communication = 0.0
    for item in machine.collectives:
        assert item.started is not None and item.stopped is not None
        together = graph.together(item.transfers)
        communication += together.duration + together.then
        spans.append(TransferSpan(item.transfers, item.started, item.stopped))
    compute = graph.elapsed[-1]
    return Timeline(
        makespan=machine.makespan,
        compute=compute,
        exposed=machine.exposed,
        starved=machine.starved + machine.makespan - machine.now,
        slowdown=max(0.0, machine.now - compute - machine.exposed - machine.starved),
        communication=communication,
        peak_bytes=machine.peak,
        runs=tuple(machine.runs),
        transfers=tuple(spans),
        tail=machine.now - machine.busy_until,
        issued=machine.issued + graph.after,
    )
