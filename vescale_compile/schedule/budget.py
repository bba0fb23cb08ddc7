"""The least memory that a graph can be run in, and the error for budgets below it."""

from __future__ import annotations

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.jobs import most_frugal

_SHOWN = 3


class BudgetError(ValueError):
    """No schedule fits in the memory budget.

    Attributes:
        least_bytes: the least budget that some schedule fits in.
    """

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def least_peak(graph: TaskGraph) -> int:
    """Peak bytes of the most frugal schedule of ``graph``: the one that overlaps nothing and keeps nothing."""
    return most_frugal(graph)[0].peak


def check_budget(graph: TaskGraph, budget: int, needed: int = 0) -> None:
    """Raises BudgetError if no schedule of ``graph`` fits in ``budget`` bytes.

    Args:
        needed: bytes without which, as is known otherwise, none can be run.
    """
    machine, fullest = most_frugal(graph)
    least = max(machine.peak, needed)
    if least <= budget:
        return
    # Where the second memory is not used, it is as full as ever at the first one's fullest moment.
    position = max(range(len(fullest)), key=lambda at: fullest[at][0])
    sending = max(range(len(fullest)), key=lambda at: (fullest[at][1], at == position))
    held = _received(graph, position) | _sent(graph, sending)
    if sum(held.values()) < machine.peak:  # it is what is sent then that makes it the fullest
        held |= {f"the scratch of {t.name}": t.scratch_bytes for t in graph.transfers if t.ready == sending + 1}
    largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    listed = ", ".join(f"{size:,} of {what}" for what, size in largest)
    raise BudgetError(
        f"memory_budget is {budget:,} bytes, but even a schedule that overlaps nothing needs {least:,}, at "
        f"{graph.compute[position].name!r}: {listed}. Give at least {least} bytes, or make what is largest "
        "smaller (smaller units, fewer tokens, activation checkpointing)",
        least,
    )


def _received(graph: TaskGraph, position: int) -> dict[str, int]:
    """What the compute task at ``position`` reads, and its own memory, in bytes by name."""
    compute = graph.compute[position]
    outputs = {
        f"the output of {transfer.name}": transfer.output_bytes
        for transfer in graph.transfers
        if transfer.readers and min(transfer.readers) <= position <= max(transfer.readers)
    }
    return {f"{compute.name}'s own (activations, shards, states)": compute.live_bytes} | outputs


def _sent(graph: TaskGraph, position: int) -> dict[str, int]:
    """What the compute task at ``position`` writes for others, in bytes by name."""
    return {
        f"the input of {transfer.name}": transfer.input_bytes
        for transfer in graph.transfers
        if transfer.writers and min(transfer.writers) <= position <= max(transfer.writers)
    }
