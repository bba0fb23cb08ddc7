"""What the list scheduler places: collectives of one or more transfers, and the memory that they can't do without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vescale_compile.schedule.graph import Bytes, TaskGraph
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine

Group = tuple[int, ...]
"""Transfers that share a collective, by their indices."""

Grouping = Sequence[Group]
"""Groups, of which a transfer is in one at most; those in none go alone."""


@dataclass(frozen=True, eq=False)
class Job:
    """A collective to be placed; equal to itself alone.

    Attributes:
        transfers: indices in the graph.
        ready: the first position before which it can be launched.
        deadline: the position before which it must be done; the number of positions where that is the end.
        duration: seconds, with the wire to itself.
        launch: seconds that its launch takes.
        issue: seconds that the host takes for it.
        taken: bytes that its launch adds to what is held, by memory.
        returned: bytes that its wait gives back.
        kept_bytes: that it takes of the first memory, and its wait does not give back.
    """

    transfers: tuple[int, ...]
    ready: int
    deadline: int
    duration: float
    launch: float
    issue: float
    taken: Bytes
    returned: Bytes
    kept_bytes: int

    @cached_property
    def size(self) -> int:
        """Bytes that its launch takes, wherever."""
        return sum(self.taken)

    @cached_property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        """Jobs in the order of their deadlines; among equals in that in which they get ready, then by index."""
        return (self.deadline, self.ready, self.transfers)


def make_jobs(lifetimes: Lifetimes, grouping: Grouping) -> tuple[Job, ...]:
    """The collectives of a graph under a choice of kept outputs and of groups, by their deadlines."""
    graph, kept = lifetimes.graph, lifetimes.kept
    groups = [tuple(index for index in group if index not in kept) for group in grouping]
    grouped = {index for group in groups for index in group}
    groups += [(index,) for index in range(len(graph.transfers)) if index not in kept and index not in grouped]
    return tuple(sorted((job_of(graph, group) for group in groups if group), key=lambda job: job.order))


def synchronous(lifetimes: Lifetimes, jobs: Sequence[Job]) -> tuple[Machine, tuple[Bytes, ...]]:
    """The program that overlaps nothing: each buffer lives as short as it can.

    What must be written first is launched and waited for as soon as it has been written, and the rest where it is
    needed. No program with these jobs holds less while a compute task runs, if no output is larger than the input it
    is made of. Only a launch could find more room for its scratch later.

    Returns:
        The machine after the program, and by position the most bytes there, up to what comes next.
    """
    machine = Machine(lifetimes)
    positions = len(lifetimes.graph.compute)
    due: list[list[Job]] = [[] for _ in range(positions)]
    ready: list[list[Job]] = [[] for _ in range(positions + 1)]
    for job in jobs:
        if job.ready:
            ready[job.ready].append(job)
        else:
            due[job.deadline].append(job)
    fullest = []
    for position in range(positions):
        machine.most = [0, 0]
        _one_by_one(machine, due[position])
        machine.run(position)
        # Each leaves more room than there was for it: what takes the least goes first.
        _one_by_one(machine, sorted(ready[position + 1], key=lambda job: (job.size, job.order)))
        fullest.append((machine.most[0], machine.most[1]))
    machine.most = [max(memory) for memory in zip(*fullest, strict=True)]
    return machine, tuple(fullest)


def most_frugal(graph: TaskGraph) -> tuple[Machine, tuple[Bytes, ...]]:
    """:func:`synchronous` for all transfers of a graph, each alone."""
    lifetimes = Lifetimes(graph)
    return synchronous(lifetimes, make_jobs(lifetimes, ()))


def _one_by_one(machine: Machine, jobs: Sequence[Job]) -> None:
    for job in jobs:
        machine.launch(job.transfers)
        machine.wait(job.transfers)


def job_of(graph: TaskGraph, group: tuple[int, ...]) -> Job:
    """The collective that these transfers, by their indices, make together."""
    together = graph.together(group)
    deadlines = [graph.transfers[index].deadline for index in group]
    return Job(
        transfers=group,
        ready=together.ready,
        deadline=min(len(graph.compute) if deadline is None else deadline for deadline in deadlines),
        duration=together.duration,
        launch=together.launch,
        issue=together.issue,
        taken=graph.split(together.output_bytes, together.scratch_bytes),
        returned=graph.split(0, together.scratch_bytes + together.input_bytes),
        kept_bytes=together.output_bytes,
    )
