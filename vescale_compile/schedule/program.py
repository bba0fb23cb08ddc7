"""A schedule: the one order in which a program runs its computation and launches and waits for its transfers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vescale_compile.schedule.graph import TaskGraph


class Run(NamedTuple):
    """Runs a compute task."""

    position: int


class Launch(NamedTuple):
    """Launches one collective of one or more transfers, by their indices in the graph."""

    transfers: tuple[int, ...]


class Wait(NamedTuple):
    """Waits until a collective is done, and gives its input and its scratch back."""

    transfers: tuple[int, ...]


Instruction = Run | Launch | Wait


class Placement(NamedTuple):
    """One collective: the positions before which it is launched and waited for.

    The position after the last compute task stands for the end.
    """

    transfers: tuple[int, ...]
    launch: int
    wait: int


@dataclass(frozen=True)
class Schedule:
    """A program of a task graph.

    Attributes:
        instructions: in the order in which they are issued. A lane runs its launches in this order.
        kept: transfers that are left out: the output of the one that each repeats is kept for its readers.
    """

    instructions: tuple[Instruction, ...]
    kept: frozenset[int] = frozenset()

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The collectives in the order of their launches."""
        position = 0
        launched: dict[tuple[int, ...], int] = {}
        waited: dict[tuple[int, ...], int] = {}
        for instruction in self.instructions:
            match instruction:
                case Run(done):
                    position = done + 1
                case Launch(transfers):
                    launched[transfers] = position
                case Wait(transfers):
                    waited[transfers] = position
        return tuple(Placement(transfers, at, waited[transfers]) for transfers, at in launched.items())

    def describe(self, graph: TaskGraph) -> str:
        """One line for each instruction, by the names of ``graph``'s tasks."""
        return "\n".join(describe(graph, instruction) for instruction in self.instructions)


def describe(graph: TaskGraph, instruction: Instruction) -> str:
    """An instruction in words."""
    match instruction:
        case Run(position):
            return f"run    {graph.compute[position].name}"
        case Launch(transfers):
            return f"launch {names(graph, transfers)}"
        case Wait(transfers):
            return f"wait   {names(graph, transfers)}"


def names(graph: TaskGraph, transfers: tuple[int, ...]) -> str:
    """The name of a collective."""
    return " + ".join(graph.transfers[index].name for index in transfers)
