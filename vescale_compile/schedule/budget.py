"""The least memory that a graph can be run in, and the error for budgets below it."""

from __future__ import annotations

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.jobs import make_jobs, synchronous
from vescale_compile.schedule.lifetimes import Lifetimes

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
    return max(_least(graph))


def check_budget(graph: TaskGraph, budget: int) -> None:
    """Raises BudgetError if no schedule of ``graph`` fits in ``budget`` bytes."""
    least = _least(graph)
    if max(least) <= budget:
        return
    position = least.index(max(least))
    compute = graph.compute[position]
    held = {f"{compute.name}'s own (activations, shards, states)": compute.live_bytes}
    for transfer in graph.transfers:
        if transfer.writers and min(transfer.writers) <= position <= max(transfer.writers):
            held[f"the input of {transfer.name}"] = transfer.input_bytes
        if transfer.readers and min(transfer.readers) <= position <= max(transfer.readers):
            held[f"the output of {transfer.name}"] = transfer.output_bytes
    largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    listed = ", ".join(f"{size:,} of {what}" for what, size in largest)
    raise BudgetError(
        f"memory_budget is {budget:,} bytes, but even a schedule that overlaps nothing needs {max(least):,}, at "
        f"{compute.name!r}: {listed}. Give at least that, or make what is largest smaller "
        "(smaller units, fewer tokens, activation checkpointing)",
        max(least),
    )


def _least(graph: TaskGraph) -> tuple[int, ...]:
    lifetimes = Lifetimes(graph)
    return synchronous(lifetimes, make_jobs(lifetimes, ()))[1]
