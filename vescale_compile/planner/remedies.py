"""What would help a unit whose padding no layout can avoid, with figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from vescale_compile.planner.spec import TensorSpec
from vescale_compile.planner.unit import plan_unit

MOST_JOINED = 4
"""Units that are joined at most: the buffer of the joint unit is in memory as one."""

_ENOUGH_PERCENT = 1.0  # of padding: who has less needs nothing else


@dataclass(frozen=True)
class Remedy:
    """A change to the sharding of a unit and what it leads to.

    Args:
        joined: units of this content planned as one, so that their blocks share the ranks.
        shard_ranks: ranks that share a buffer; the others hold replicas.
        replicas: copies of each shard.
        buffers: buffers of the changed unit.
        padding_percent: padding in per cent of the tensors' elements.
        memory_factor: elements of each rank for each unit, relative to now.
    """

    joined: int
    shard_ranks: int
    replicas: int
    buffers: int
    padding_percent: float
    memory_factor: float

    def __str__(self) -> str:
        what = (
            f"{self.joined} such units as one"
            if self.joined > 1
            else f"shards on {self.shard_ranks} ranks, {self.replicas} replicas"
        )
        return f"{what}: padding {self.padding_percent:.2f} %, {self.memory_factor:.2f} times the memory"


def remedies(
    tensors: Sequence[TensorSpec],
    world_size: int,
    *,
    alignment_bytes: int = 16,
    keep_order: bool = False,
    alike: int = 4,
) -> list[Remedy]:
    """Units joined by twos, threes and fours, and shard meshes of a half, a quarter, ... of the ranks.

    Each kind is listed as far as it pads less than what came before it, and until it pads by less
    than a per cent.

    Args:
        alike: how many units of this content the model has to join.

    The others are those of ``plan_unit``.
    """
    plan = partial(plan_unit, alignment_bytes=alignment_bytes, keep_order=keep_order)
    now = plan(tensors, world_size)
    joined = [(count, world_size) for count in range(2, min(alike, MOST_JOINED) + 1)]
    smaller = []
    ranks = world_size
    while ranks % 2 == 0:
        ranks //= 2
        smaller.append((1, ranks))
    found = []
    for changes in (joined, smaller):
        least = now.padding_percent
        for count, ranks in changes:
            if least <= _ENOUGH_PERCENT:
                break
            copies = [replace(t, name=f"{copy}.{t.name}") for copy in range(count) for t in tensors]
            then = plan(copies, ranks)
            if then.padding_percent < least:
                least = then.padding_percent
                memory = then.shard_numel / count / now.shard_numel
                found.append(Remedy(count, ranks, world_size // ranks, len(then.buffers), least, memory))
    return found
