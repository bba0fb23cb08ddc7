"""Launches as early as they may be: a schedule that trusts predicted times no more than it has to.

The list scheduler launches what keeps the wire busy by prediction. Where computation takes longer than predicted, or
the wire less, the next launch comes late and the wire rests; and messages of gloo that are launched while one is in
flight rest for as long as both sides take to learn of them, which goes unseen with others in between. With a few in
flight neither shows, and more would only put their copies before the first computation. On several lanes what flies
early takes its share of the wire from what is needed first: that may cost a percent of the predicted time, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence

from vescale_compile.schedule.graph import Bytes, TaskGraph
from vescale_compile.schedule.jobs import Job, job_of
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine
from vescale_compile.schedule.program import Launch, Run, Schedule
from vescale_compile.schedule.search import Scheduled
from vescale_compile.schedule.simulate import simulate

IN_FLIGHT = 4
"""No launch is moved to where as many collectives are in flight."""

LONGER = 1.01
"""How much longer a step may be predicted to take, as a factor."""


def launched_early(graph: TaskGraph, found: Scheduled) -> Scheduled:
    """What was found, with launches as early as inputs, their order, the peak of memory and what is in flight allow; as
    it was, if it would take more than :data:`LONGER` then."""
    schedule = _moved(graph, found.schedule)
    early = Scheduled(schedule, simulate(graph, schedule))
    return found if early.timeline.makespan > LONGER * found.timeline.makespan else early


def _moved(graph: TaskGraph, schedule: Schedule) -> Schedule:
    levels, flying = _taken(graph, schedule)
    most = [max(memory) for memory in zip(*levels, strict=True)]
    program = list(schedule.instructions)
    for index, instruction in enumerate(program):
        if not isinstance(instruction, Launch):
            continue
        job = job_of(graph, instruction.transfers)
        place = index
        while place > 0 and _fits(job, levels[place - 1], most) and flying[place - 1] < IN_FLIGHT:
            before = program[place - 1]
            if isinstance(before, Launch) or before == Run(job.ready - 1):
                break
            place -= 1
        if place == index:
            continue
        program.insert(place, program.pop(index))
        levels[place : index + 1] = [_with(job, level) for level in (levels[place], *levels[place:index])]
        flying[place : index + 1] = [flying[place], *(count + 1 for count in flying[place:index])]
    return Schedule(tuple(program), schedule.kept)


def _fits(job: Job, level: Bytes, most: Sequence[int]) -> bool:
    return all(held <= limit for held, limit in zip(_with(job, level), most, strict=True))


def _with(job: Job, level: Bytes) -> Bytes:
    return level[0] + job.taken[0], level[1] + job.taken[1]


def _taken(graph: TaskGraph, schedule: Schedule) -> tuple[list[Bytes], list[int]]:
    """While each instruction runs: the most bytes that are live, or were just before, and the collectives in flight."""
    machine = Machine(Lifetimes(graph, schedule.kept))
    levels, flying = [], []
    for instruction in schedule.instructions:
        flying.append(len(machine.outstanding))
        machine.most = [machine.held[0] + graph.between[machine.position], machine.held[1]]
        machine.execute(instruction)
        levels.append((machine.most[0], machine.most[1]))
    return levels, flying
