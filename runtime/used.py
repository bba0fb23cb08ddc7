"""Parameters of a unit that not every rank uses: an expert that got no tokens, a branch that was not taken.

As with DistributedDataParallel(find_unused_parameters=True), a parameter that has a gradient on one rank gets one on
all. A rank that did not use it has sent zeros.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from .collectives import start_asking
from .dbuffer import DBuffer
from .life import life
from .messages import CAME_TO_SOMETHING_ELSE


def add_graph(layout: str, frozen: AbstractSet[int], used: AbstractSet[int]) -> None:
    """Takes down for which parameters of a unit a graph, on which all ranks have agreed, computes gradients, and which
    it reads that were frozen."""
    life().gradients.setdefault(layout, set()).add((frozenset(frozen), frozenset(used)))


def alike_on_all_ranks(layout: str, trained: AbstractSet[int]) -> bool:
    """Whether all graphs that may run for a unit of which ``trained`` are not frozen compute the same gradients,
    whichever of them each rank runs: Dynamo runs none that was compiled where other parameters were frozen."""
    agreed = life().gradients.get(layout, ())
    return len({used for frozen, used in agreed if used <= trained and frozen.isdisjoint(trained)}) <= 1


def used_on_any_rank(buffer: DBuffer, used: set[int], *, trained: AbstractSet[int], alike: bool) -> set[int]:
    """Indices of the parameters that have a gradient on any rank, where those ``used`` have one on this rank.

    A small collective, whose result a rank reads at once that lacks a gradient. None for a unit's only parameter, which
    has a gradient wherever the unit has one; and none where graphs compute the same gradients on all ranks.

    Args:
        buffer: the unit's.
        used: indices in ``buffer.params``.
        trained: indices of those that may have one.
        alike: whether graphs have computed all of these gradients, and the same on all ranks.
    """
    if len(buffer.params) == 1 or alike:
        return used
    own = [index in used for index in range(len(buffer.params))]
    try:
        answer = start_asking(own, buffer.shard.device, [group for group in (buffer.group, buffer.replicas) if group])
    except RuntimeError as error:
        raise RuntimeError(
            f"[rank {buffer.rank}] unit {buffer.name}: waited in vain for the other ranks to say which of its "
            f"parameters they used; one of them {CAME_TO_SOMETHING_ELSE}: {error}"
        ) from error
    if trained <= used:  # who needs no answer does not wait for it
        return used
    return {index for index, anywhere in enumerate(answer()) if anywhere}
