"""What would help a unit whose padding no layout can avoid, with figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vescale_compile.planner.spec import TensorSpec
from vescale_compile.planner.unit import plan_unit


@dataclass(frozen=True)
class Remedy:
    """A change to the sharding of a unit and what it leads to.

    Args:
        layers: units of this content planned as one, so that their blocks share the ranks.
        shard_ranks: ranks that share a buffer; the others hold replicas.
        replicas: copies of each shard.
        buffers: buffers of the changed unit.
        padding_percent: padding in per cent of the tensors' elements.
        memory_factor: elements of each rank for each layer, relative to the unit as it is.
    """

    layers: int
    shard_ranks: int
    replicas: int
    buffers: int
    padding_percent: float
    memory_factor: float

    def __str__(self) -> str:
        what = (
            f"{self.layers} layers in one unit"
            if self.layers > 1
            else f"shards on {self.shard_ranks} ranks, {self.replicas} replicas"
        )
        return f"{what}: padding {self.padding_percent:.2f} %, {self.memory_factor:.2f} times the memory"


def remedies(
    tensors: Sequence[TensorSpec],
    world_size: int,
    *,
    alignment_bytes: int = 16,
    most_layers: int = 4,
    enough_percent: float = 1.0,
) -> list[Remedy]:
    """Joint units of 2 to ``most_layers`` layers, and shard meshes of a half, a quarter, ... of the ranks.

    Each kind is listed as far as it pads less than what came before it, and until ``enough_percent`` is
    reached. Arguments otherwise as for ``plan_unit``.
    """
    now = plan_unit(tensors, world_size, alignment_bytes=alignment_bytes)
    joined = [(layers, world_size) for layers in range(2, most_layers + 1)]
    smaller = []
    ranks = world_size
    while ranks % 2 == 0:
        ranks //= 2
        smaller.append((1, ranks))
    found = []
    for changes in (joined, smaller):
        least = now.padding_percent
        for layers, ranks in changes:
            if least <= enough_percent:
                break
            copies = [replace(t, name=f"{copy}.{t.name}") for copy in range(layers) for t in tensors]
            plan = plan_unit(copies, ranks, alignment_bytes=alignment_bytes)
            if plan.padding_percent < least:
                least = plan.padding_percent
                memory = plan.shard_numel / layers / now.shard_numel
                found.append(Remedy(layers, ranks, world_size // ranks, len(plan.buffers), least, memory))
    return found
