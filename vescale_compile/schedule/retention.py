"""Which outputs could be kept from one use to the next instead of being brought again (selective resharding)."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_compile.schedule.graph import TaskGraph


def free_to_keep(graph: TaskGraph) -> frozenset[int]:
    """Repeats whose readers come next after those of the first use: keeping that output takes no memory."""
    gaps = {index: _gap(graph, index) for index in _repeats(graph)}
    return frozenset(index for index, (start, stop) in gaps.items() if start == stop)


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
        start, stop = _gap(graph, index)
        size = graph.transfers[index].output_bytes
        if max(used[start:stop], default=0) + size <= budget:
            chosen.append(index)
            used[start:stop] = [before + size for before in used[start:stop]]
    return tuple(chosen)


def _repeats(graph: TaskGraph) -> list[int]:
    return [index for index, transfer in enumerate(graph.transfers) if transfer.repeats is not None]


def _gap(graph: TaskGraph, index: int) -> tuple[int, int]:
    """Positions through which the output is held for nothing but its next use."""
    transfer = graph.transfers[index]
    assert transfer.repeats is not None
    return max(graph.transfers[transfer.repeats].readers) + 1, min(transfer.readers)


def _reward(graph: TaskGraph, index: int) -> float:
    start, stop = _gap(graph, index)
    held = graph.elapsed[stop] - graph.elapsed[start]
    price = graph.transfers[index].output_bytes * held
    return graph.transfers[index].duration / price if price else float("inf")
