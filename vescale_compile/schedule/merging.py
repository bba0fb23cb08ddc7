"""Which transfers could share a collective, so that its latency is paid once."""

from __future__ import annotations

from collections.abc import Iterator

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.jobs import Grouping

_SIZES = (2, 3, 4, 8, 16)


def groupings(graph: TaskGraph, kept: frozenset[int]) -> Iterator[Grouping]:
    """Groupings worth trying: runs of neighbours, of a few sizes, for each class of mergeable transfers or for all.

    Neighbours follow one another in the order in which they are needed and ready, so that a group is held little
    longer than its members alone.
    """
    classes: dict[tuple[str, str], list[int]] = {}
    for index, transfer in enumerate(graph.transfers):
        if transfer.merge is not None and index not in kept:
            classes.setdefault((transfer.merge, transfer.lane), []).append(index)
    lines = [sorted(line, key=lambda index: _need(graph, index)) for line in classes.values() if len(line) > 1]
    for size in _SIZES:
        if any(len(line) >= size for line in lines):
            cut = [_cut(graph, line, size) for line in lines]
            yield tuple(group for groups in cut for group in groups)
            if len(lines) > 1:
                yield from (tuple(groups) for groups in cut if groups)


def _need(graph: TaskGraph, index: int) -> tuple[int, int, int]:
    transfer = graph.transfers[index]
    return (len(graph.compute) if transfer.deadline is None else transfer.deadline, transfer.ready, index)


def _cut(graph: TaskGraph, line: list[int], size: int) -> list[tuple[int, ...]]:
    """Runs of up to ``size``, none of which is read before all of it is written."""
    groups: list[tuple[int, ...]] = []
    for index in line:
        last = groups[-1] if groups else ()
        if last and len(last) < size and _together(graph, (*last, index)):
            groups[-1] = (*last, index)
        else:
            groups.append((index,))
    return [group for group in groups if len(group) > 1]


def _together(graph: TaskGraph, group: tuple[int, ...]) -> bool:
    return max(graph.transfers[index].ready for index in group) <= min(_need(graph, index)[0] for index in group)
