"""Exhaustive search: the best schedule of a small graph, to measure others against.

It tries every choice of kept outputs, every grouping of transfers that may share a collective, and every program:
before each compute task any transfers launched in any order, and any inputs and scratch waited for. Only what can't
be better is left out: states seen before, and programs that can no longer beat the best one. Outputs are waited for
where they are read; sooner frees nothing and could only stall.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.jobs import Grouping, Job, make_jobs
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine
from vescale_compile.schedule.program import Schedule


def best_schedule(graph: TaskGraph, budget: int | None = None, below: float = math.inf) -> Schedule | None:
    """The schedule of the least makespan whose peak memory is at most ``budget`` bytes; None if there is none.

    Its time grows exponentially: it is for graphs of about ten transfers. Only schedules of a makespan less than
    ``below`` are looked for, the faster the lower that is.
    """
    best: Machine | None = None
    repeats = [index for index, transfer in enumerate(graph.transfers) if transfer.repeats is not None]
    for count in range(len(repeats) + 1):
        for kept in map(frozenset, itertools.combinations(repeats, count)):
            for grouping in _groupings(graph, kept):
                best = _Search(Lifetimes(graph, kept), grouping, budget, below, best).best
    return Schedule(tuple(best.instructions), best.lifetimes.kept) if best else None


def _groupings(graph: TaskGraph, kept: frozenset[int]) -> Iterator[Grouping]:
    """Every way to put the transfers that may share collectives into groups."""
    classes: dict[tuple[str, str], list[int]] = {}
    for index, transfer in enumerate(graph.transfers):
        if transfer.merge is not None and index not in kept:
            classes.setdefault((transfer.merge, transfer.lane), []).append(index)
    for parts in itertools.product(*map(_partitions, classes.values())):
        yield tuple(group for part in parts for group in part)


def _partitions(items: list[int]) -> list[Grouping]:
    if not items:
        return [()]
    first, rest = items[0], items[1:]
    found: list[Grouping] = []
    for smaller in _partitions(rest):
        found.append(((first,), *smaller))
        for place, group in enumerate(smaller):
            found.append((*smaller[:place], (first, *group), *smaller[place + 1 :]))
    return found


class _Search:
    """Depth first through all programs of the jobs of one frame."""

    def __init__(
        self, lifetimes: Lifetimes, grouping: Grouping, budget: int | None, below: float, best: Machine | None
    ) -> None:
        self.jobs = [job for job in make_jobs(lifetimes, grouping) if _possible(job)]
        self.elapsed = lifetimes.graph.elapsed
        self.budget, self.below, self.best = budget, below, best
        self.seen: set[object] = set()
        if len(self.jobs) == len(make_jobs(lifetimes, grouping)):
            self._visit(Machine(lifetimes))

    def _visit(self, machine: Machine) -> None:
        if self.budget is not None and machine.peak > self.budget:
            return
        if self._least_makespan(machine) >= (self.below if self.best is None else self.best.makespan):
            return
        state = (
            machine.position,
            machine.now,
            _in_flight(machine),
            frozenset(machine.launched),
            frozenset(machine.done),
            tuple(machine.most) if machine.graph.apart else None,  # what there is room for later
        )
        if state in self.seen:
            return
        self.seen.add(state)
        if machine.position == len(self.elapsed) - 1 and len(machine.launched) == len(machine.done) == self._count:
            self.best = machine
            return
        for following in self._next(machine):
            self._visit(following)

    @property
    def _count(self) -> int:
        return sum(len(job.transfers) for job in self.jobs)

    def _least_makespan(self, machine: Machine) -> float:
        to_compute = self.elapsed[-1] - self.elapsed[machine.position]
        to_launch = sum(job.duration for job in self.jobs if job.transfers[0] not in machine.launched)
        return max(machine.now + max(to_compute, machine.backlog() + to_launch), machine.makespan)

    def _next(self, machine: Machine) -> Iterator[Machine]:
        end = len(self.elapsed) - 1
        if machine.position < end and all(
            index in machine.launched for index in machine.lifetimes.needs[machine.position]
        ):
            following = _fork(machine)
            for index in machine.lifetimes.needs[machine.position]:
                for transfers in [group for group in following.outstanding if index in group]:
                    following.wait(transfers)
            following.run(machine.position)
            yield following
        for job in self.jobs:
            if job.transfers[0] not in machine.launched and job.ready <= machine.position:
                following = _fork(machine)
                following.launch(job.transfers)
                yield following
            elif job.transfers in machine.outstanding and (any(job.returned) or machine.position == end):
                following = _fork(machine)
                following.wait(job.transfers)
                yield following


def _fork(machine: Machine) -> Machine:
    """An independent copy."""
    twin = copy.copy(machine)
    # What the wire is done with changes no more.
    copies = {each.transfers: copy.copy(each) if each.stopped is None else each for each in machine.collectives}
    twin.collectives = list(copies.values())
    twin.outstanding = {transfers: copies[transfers] for transfers in machine.outstanding}
    twin._lanes = {lane: [copies[each.transfers] for each in queue] for lane, queue in machine._lanes.items()}
    twin.instructions, twin.runs = list(machine.instructions), list(machine.runs)
    twin.held, twin.most = list(machine.held), list(machine.most)
    twin.launched, twin.done = set(machine.launched), set(machine.done)
    return twin


def _in_flight(machine: Machine) -> tuple[object, ...]:
    """What is on the wire or waits for it, and the seconds that are left of each, lane by lane; those that are left of
    what is behind the wire; and those in which nothing more can go there."""
    flying = [each for each in machine.collectives if each.stopped is None]
    behind = [(each.transfers, each.stopped - machine.now) for each in machine.outstanding.values() if each.stopped]
    return (
        tuple((each.transfers, each.remaining) for each in sorted(flying, key=lambda each: each.lane)),
        tuple(each for each in behind if each[1] > 0),
        max(0.0, machine._free - machine.now),
    )


def _possible(job: Job) -> bool:
    """A group of transfers is no use if one is read before another is written."""
    return job.ready <= job.deadline
