"""A schedule: the one order in which a program runs its computation and launches and waits for its transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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


@dataclass(frozen=True)
class Schedule:
    """A program of a task graph.

    Attributes:
        instructions: in the order in which they are issued. A lane runs its launches in this order.
        kept: transfers that are left out: the output of the one that each repeats is kept for its readers.
    """

    instructions: tuple[Instruction, ...]
    kept: frozenset[int] = frozenset()
