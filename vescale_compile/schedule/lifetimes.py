"""Which buffers of transfers begin and end to live where, given which transfers are left out."""

from __future__ import annotations

from vescale_compile.schedule.graph import TaskGraph


class Lifetimes:
    """The buffers of a graph under a choice of kept outputs.

    Attributes:
        inputs_at: bytes of the inputs that position p is the first to write.
        outputs_after: bytes of the outputs that position p is the last to read.
        needs: by position, the transfers that must be done before it.
        last_reader: by transfer, the position after which its output is given back; None: never.

    Raises:
        ValueError: ``kept`` names a transfer that repeats none.
    """

    def __init__(self, graph: TaskGraph, kept: frozenset[int] = frozenset()) -> None:
        self.graph, self.kept = graph, kept
        self.last_reader = [max(transfer.readers, default=None) for transfer in graph.transfers]
        for index in sorted(kept):
            source = self.source(index)
            # Repeats come after what they repeat, and are read after it.
            self.last_reader[source] = self.last_reader[index]
        positions = len(graph.compute)
        self.inputs_at, self.outputs_after = [0] * positions, [0] * positions
        self.needs: list[list[int]] = [[] for _ in range(positions)]
        for index, transfer in enumerate(graph.transfers):
            if index in kept:
                continue
            if transfer.writers:
                self.inputs_at[min(transfer.writers)] += transfer.input_bytes
            last = self.last_reader[index]
            if last is not None:
                self.outputs_after[last] += transfer.output_bytes
            if transfer.deadline is not None:
                self.needs[transfer.deadline].append(index)

    def source(self, index: int) -> int:
        """The transfer whose output the readers of ``index`` get."""
        while index in self.kept:
            repeated = self.graph.transfers[index].repeats
            if repeated is None:
                name = self.graph.transfers[index].name
                raise ValueError(f"transfer {name!r} can't be left out: it repeats none whose output could be kept")
            index = repeated
        return index
