"""Which outputs could be kept from one use to the next instead of being brought again (selective resharding)."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_compile.schedule.graph import TaskGraph


def free_to_keep(graph: TaskGraph) -> frozenset[int]:
    """Repeats whose readers come next after those of the first use: keeping that output takes no memory."""
    return frozenset(index for index in _repeats(graph) if not graph.gap(graph.transfers[index]))


def keepable(graph: TaskGraph, least: Sequence[int], budget: int) -> tuple[int, ...]:
    """Repeats that may be left out, the most rewarding first: any first few of them fit in ``budget`` together.

    The reward is the time saved for the bytes held and the time for which they are held: of equal units the last
    ones of the forward, which the backward needs first, are the best to keep.

    Args:
        least: by position, the bytes without which nothing works.
        budget: bytes that no position may exceed.
    """
    used = list(least)
    chosen = []
    for index in sorted(_repeats(graph), key=lambda index: (-_reward(graph, index), index)):
        gap = graph.gap(graph.transfers[index])
        size = graph.transfers[index].output_bytes
        if max((used[position] for position in gap), default=0) + size <= budget:
            chosen.append(index)
            for position in gap:
                used[position] += size
    return tuple(chosen)


def _repeats(graph: TaskGraph) -> list[int]:
    return [index for index, transfer in enumerate(graph.transfers) if transfer.repeats is not None]


def _reward(graph: TaskGraph, index: int) -> float:
    transfer = graph.transfers[index]
    gap = graph.gap(transfer)
    price = transfer.output_bytes * (graph.elapsed[gap.stop] - graph.elapsed[gap.start])
    return transfer.duration / price if price else float("inf")
