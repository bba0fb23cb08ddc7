"""Which transfers could share a collective, so that its latency is paid once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.jobs import Group

_SIZES = (2, 3, 4, 8, 16)


class Cut(NamedTuple):
    """How a line of transfers is cut into groups.

    Attributes:
        size: of a group, at most.
        shrinking: the last ones are smaller, down to one transfer: less is left to be done when they are over.
    """

    size: int
    shrinking: bool

    def of(self, graph: TaskGraph, line: Sequence[int]) -> list[Group]:
        """Runs of neighbours, none of which is read before all of it is written."""
        groups: list[Group] = []
        begin = 0
        while begin < len(line):
            end = begin + 1
            while end < begin + self._most(len(line) - begin) and _together(graph, line[begin : end + 1]):
                end += 1
            groups.append(tuple(line[begin:end]))
            begin = end
        return [group for group in groups if len(group) > 1]

    def _most(self, left: int) -> int:
        return min(self.size, -(-left // 2) if self.shrinking else left)


CUTS = tuple(itertools.starmap(Cut, itertools.product(_SIZES, (False, True))))


def mergeable(graph: TaskGraph, kept: frozenset[int]) -> list[list[int]]:
    """Each class of transfers that may share collectives, as a line in the order in which they are needed and ready:
    so a group of neighbours is held little longer than its members alone."""
    classes: dict[tuple[str, str], list[int]] = {}
    for index, transfer in enumerate(graph.transfers):
        if transfer.merge is not None and index not in kept:
            classes.setdefault((transfer.merge, transfer.lane), []).append(index)
    return [sorted(line, key=lambda index: _need(graph, index)) for line in classes.values() if len(line) > 1]


def _need(graph: TaskGraph, index: int) -> tuple[int, int, int]:
    transfer = graph.transfers[index]
    return (len(graph.compute) if transfer.deadline is None else transfer.deadline, transfer.ready, index)


def _together(graph: TaskGraph, group: Sequence[int]) -> bool:
    return max(graph.transfers[index].ready for index in group) <= min(_need(graph, index)[0] for index in group)
