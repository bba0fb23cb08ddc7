"""Graphs of many small compute tasks as graphs of fewer, which are faster to schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.program import Instruction, Run, Schedule
from vescale_compile.schedule.tasks import Compute


@dataclass(frozen=True)
class CoarseGraph:
    """A graph whose tasks are runs of consecutive tasks of another one.

    Attributes:
        graph: with the other one's transfers. Within a task no transfer becomes ready or is due, and no buffer
            begins or ends to live: all that is lost is the places in between at which a transfer could be launched, and
            where in a task its host keeps the device waiting.
        starts: by task, the position of its first one in the other graph; at last, the number of tasks there.
    """

    graph: TaskGraph
    starts: tuple[int, ...]

    def expand(self, schedule: Schedule) -> Schedule:
        """A schedule of ``graph`` as one of the graph that was coarsened."""
        instructions: list[Instruction] = []
        for instruction in schedule.instructions:
            if isinstance(instruction, Run):
                start, stop = self.starts[instruction.position : instruction.position + 2]
                instructions += [Run(position) for position in range(start, stop)]
            else:
                instructions.append(instruction)
        return Schedule(tuple(instructions), schedule.kept)


def coarsen(graph: TaskGraph, pieces: int) -> CoarseGraph:
    """Joins compute tasks between which nothing need happen, unless they take longer than a share of the step.

    Args:
        pieces: a task of more than one part takes at most the ``pieces``-th part of the whole computation.
    """
    edges = {0}
    for transfer in graph.transfers:
        for positions in (transfer.writers, transfer.readers):
            if positions:
                edges |= {min(positions), max(positions) + 1}
    longest = graph.elapsed[-1] / pieces
    starts: list[int] = []
    for position in range(len(graph.compute)):
        if position in edges or graph.elapsed[position + 1] - graph.elapsed[starts[-1]] > longest:
            starts.append(position)
    piece = [0] * len(graph.compute)
    tasks = []
    for index, (start, stop) in enumerate(zip(starts, [*starts[1:], len(graph.compute)], strict=True)):
        piece[start:stop] = [index] * (stop - start)
        parts = graph.compute[start:stop]
        name = parts[0].name if len(parts) == 1 else f"{parts[0].name} to {parts[-1].name}"
        duration, issue = sum(part.duration for part in parts), sum(part.issue for part in parts)
        tasks.append(Compute(name, duration, max(part.live_bytes for part in parts), issue))
    transfers = tuple(
        replace(
            transfer,
            writers=tuple(sorted({piece[position] for position in transfer.writers})),
            readers=tuple(sorted({piece[position] for position in transfer.readers})),
        )
        for transfer in graph.transfers
    )
    coarse = replace(graph, compute=tuple(tasks), transfers=transfers)
    return CoarseGraph(coarse, (*starts, len(graph.compute)))
