"""One order of launches for graphs whose computation is cut differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.machine import ScheduleError
from vescale_compile.schedule.program import Instruction, Launch, Run, Schedule

Touches = Sequence[Sequence[int]]
"""For each transfer, the positions that write its input or read its output."""


def touches(graph: TaskGraph) -> list[list[int]]:
    return [[*transfer.writers, *transfer.readers] for transfer in graph.transfers]


def adapt(schedule: Schedule, made_for: Touches, tasks: int, graph: TaskGraph) -> Schedule:
    """Launches the same collectives in the same order in another graph of the same transfers.

    Each launch and wait comes when as much has been touched for the last time as where it was, and nothing that had
    not been touched yet; before, if it must be.

    Args:
        schedule: of a graph with this number of ``tasks`` and these touches.
        graph: which touches its transfers in the same order, but has more of them touched by one task, or fewer, or
            more tasks between.

    Raises:
        ScheduleError: a task of ``graph`` reads what comes after a launch that must wait for that task.
    """
    own, latest = touches(graph), _latest(schedule, graph)
    placed: list[tuple[int, Instruction]] = [(position, Run(position)) for position in range(len(graph.compute))]
    launched: dict[tuple[int, ...], int] = {}
    before = last = 0
    for instruction in schedule.instructions:
        if isinstance(instruction, Run):
            before = _place(instruction.position + 1, made_for, tasks, own, len(graph.compute))
            continue
        transfers = instruction.transfers
        if isinstance(instruction, Launch):
            due = latest[transfers]
            last = launched[transfers] = max(min(before, due), last, graph.together(transfers).ready)
            if last > due:
                names = ", ".join(graph.transfers[index].name for index in transfers)
                raise ScheduleError(f"{names}: ready for a launch at position {last}, and due at position {due}")
            placed.append((last, instruction))
        else:
            placed.append((max(min(before, _due(transfers, graph)), launched[transfers]), instruction))
    placed.sort(key=lambda each: (each[0], isinstance(each[1], Run)))
    return replace(schedule, instructions=tuple(instruction for _, instruction in placed))


def _latest(schedule: Schedule, graph: TaskGraph) -> dict[tuple[int, ...], int]:
    """The position before which each launch must come: no later than those after it."""
    latest: dict[tuple[int, ...], int] = {}
    due = len(graph.compute)
    for transfers in (each.transfers for each in reversed(schedule.instructions) if isinstance(each, Launch)):
        due = latest[transfers] = min(due, _due(transfers, graph))
    return latest


def _due(transfers: tuple[int, ...], graph: TaskGraph) -> int:
    """The first position that reads what one of them brings."""
    deadlines = (graph.transfers[index].deadline for index in transfers)
    return min((each for each in deadlines if each is not None), default=len(graph.compute))


def _place(position: int, made_for: Touches, tasks: int, own: Touches, own_tasks: int) -> int:
    """Where as much is over as before a position of the graph with ``made_for``, and no more has begun."""
    if position == tasks:
        return own_tasks
    over = [max(here) + 1 for there, here in zip(made_for, own, strict=True) if max(there) < position]
    next_ = [min(here) for there, here in zip(made_for, own, strict=True) if min(there) == position]
    return max([*over, min(next_, default=0)], default=0)
