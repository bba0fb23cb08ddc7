"""Launches as early as they may be: a schedule that trusts predicted times no more than it has to.

The list scheduler launches what keeps a wire busy by prediction. Where computation takes longer than predicted, or the
wire less, the next launch comes late and the wire rests; and messages of gloo that are launched while one is in flight
rest for as long as both sides take to learn of them, which goes unseen with another in between.
"""

from __future__ import annotations

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine
from vescale_compile.schedule.program import Launch, Run, Schedule


def launched_early(graph: TaskGraph, schedule: Schedule) -> Schedule:
    """``schedule`` with every launch as early as its inputs, the order of launches and the peak of memory allow."""
    levels = _levels(graph, schedule)
    most = max(levels)
    program = list(schedule.instructions)
    for index, instruction in enumerate(program):
        if not isinstance(instruction, Launch):
            continue
        parts = [graph.transfers[transfer] for transfer in instruction.transfers]
        taken = sum(part.output_bytes + part.scratch_bytes for part in parts)
        written = Run(max(part.ready for part in parts) - 1)
        place = index
        while place > 0 and levels[place - 1] + taken <= most:
            before = program[place - 1]
            if isinstance(before, Launch) or before == written:
                break
            place -= 1
        passed = [level + taken for level in levels[place:index]]
        levels[place : index + 1] = [passed[0] if passed else levels[index], *passed]
        program.insert(place, program.pop(index))
    return Schedule(tuple(program), schedule.kept)


def _levels(graph: TaskGraph, schedule: Schedule) -> list[int]:
    """The most bytes that are live while each instruction runs, or just before."""
    machine, levels = Machine(Lifetimes(graph, schedule.kept)), []
    for instruction in schedule.instructions:
        machine.peak = machine.held + graph.live_before(machine.position)
        machine.execute(instruction)
        levels.append(machine.peak)
    return levels
