"""Decisions that all ranks must share: what the backward gathers again, and the schedule of each graph.

They rest on predicted times and memory, which depend on the sizes of a rank's batch. Ranks whose batches differ would
launch collectives in different orders, and so would a rank that compiles again, alone, for a batch of another size. So
what the first rank to come to a graph decides holds for all, and for every later compilation of it, whatever kernels
there are between the collectives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from ..schedule import Instruction, Launch, Run, Schedule, TaskGraph, Wait, adapt, touches
from .context import CompileContext
from .tasks import Collective

Units = frozenset[int]


def agreed_units(again: Units, kept: Units, carried: Units, context: CompileContext) -> tuple[Units, Units]:
    """Of the units ``again``, which the backward would gather again, those to keep for it, and those whose gather is
    launched for it in the forward. Programs on the same units may differ in which ones their backward reads."""
    own = json.dumps([sorted(kept), sorted(carried)])
    first, second = json.loads(_decided(repr(("units", sorted(again))), own, context))
    context.imposed = frozenset(first) - kept
    return frozenset(first), frozenset(second)


class Agreed(NamedTuple):
    """A schedule that all ranks have agreed on.

    Attributes:
        schedule: of the graph that the first of them had.
        tasks: how many computations that graph has.
        touched: those that write what each of its transfers sends, or read what it brings.
    """

    schedule: Schedule
    tasks: int
    touched: list[list[int]]

    def of(self, tasks: TaskGraph) -> Schedule:
        """The same launches in the same order in a graph of the same transfers, which may be cut otherwise, as that of
        an empty batch may be.

        Raises:
            ScheduleError: they can't be, because one computation reads here what two others do there.
        """
        if (len(tasks.compute), touches(tasks)) == (self.tasks, self.touched):
            return self.schedule
        return adapt(self.schedule, self.touched, self.tasks, tasks)


def agreed_schedule(
    schedule: Schedule, tasks: TaskGraph, collectives: Sequence[Collective], context: CompileContext
) -> Agreed:
    """That of graphs with these collectives, which the program has in this order."""
    lanes = [transfer.lane for transfer in tasks.transfers]
    sequence = [(each.kind, each.unit, lanes.index(lane)) for each, lane in zip(collectives, lanes, strict=True)]
    assert context.part is not None
    what = repr((context.part.value, sequence, sorted(context.kept), sorted(context.carried)))
    own = [[type(each).__name__, *each] for each in schedule.instructions]
    decided = json.loads(_decided(what, json.dumps([own, len(tasks.compute), touches(tasks)]), context))
    instructions, count, touched = decided
    return Agreed(Schedule(tuple(_instruction(name, operand) for name, operand in instructions)), count, touched)


def _instruction(name: str, operand: int | list[int]) -> Instruction:
    if isinstance(operand, int):
        return Run(operand)
    return Launch(tuple(operand)) if name == Launch.__name__ else Wait(tuple(operand))


def _decided(what: str, own: str, context: CompileContext) -> str:
    asked = question(what, context)
    context.decisions[asked] = context.decide(asked, own)
    return context.decisions[asked]


def question(what: str, context: CompileContext) -> str:
    """Names a decision on one program; equal on all ranks, so without the names of groups, which count how many meshes
    a rank has used, and of packings, which hold them. How much is packed stays. What one rank has compiled for a layer,
    another may have for one like it: of those units there are no names."""
    units = [
        (
            "" if context.beside.one_of_many else unit.name,
            tuple(unit.shard.shape),
            unit.views,
            unit.accumulates,
            unit.comm._replace(group="", replicas="", packing="", gradient_packing=""),
            unit.reshard_after_forward,
            (unit.stride, unit.replica_stride),
        )
        for unit in context.units
    ]
    return repr((what, context.options, units))
