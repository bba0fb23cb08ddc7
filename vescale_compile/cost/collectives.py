"""Time of collectives: latency and bandwidth of each class of links (the alpha-beta model), ring and tree.

A collective of ``nbytes`` is one whose unsharded buffer has that size: what all ranks gather, what each has to be
reduced, or what each sends in an all-to-all. The algorithms are the usual ones (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005; Sanders, Speck and Träff, "Two-tree
algorithms", 2009; NCCL's ring). Every one costs a latency that does not depend on the size plus a time in proportion
to it, and the cheapest for the size is taken. A gather and a reduction have the ring alone, with a latency that grows
with the ranks: where nodes have several GPUs, NCCL has no other for them but with the switches' help (SHARP).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from vescale_compile.cost.cluster import Cluster

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL)


@dataclass(frozen=True)
class CollectiveCost:
    """What one collective costs.

    Attributes:
        algorithm: that was chosen: "ring", "tree", "pairwise", or "measured".
        latency: seconds, whatever it carries.
        wire_time: seconds in proportion to its bytes.
        load: share of the compute device that it takes while it runs.
        stretch: how many times longer it takes while the device computes beside it.
        wakeup: seconds that it takes longer on links that are idle when it is launched.
        launch: seconds for which its launch keeps the device from computing.
        call: seconds that the host takes to launch it, and to have what follows wait for it; 0 of a CPU.
    """

    algorithm: str
    latency: float
    wire_time: float
    load: float
    stretch: float = 1.0
    wakeup: float = 0.0
    launch: float = 0.0
    call: float = 0.0

    @property
    def seconds(self) -> float:
        """Its time after others, with the links to itself."""
        return self.latency + self.wire_time


NOTHING = CollectiveCost("none", 0.0, 0.0, 0.0)


def collective_cost(cluster: Cluster, kind: str, nbytes: float) -> CollectiveCost:
    """Time of a collective over all ranks of a cluster.

    Args:
        cluster: where it runs.
        kind: one of ``KINDS``.
        nbytes: of the unsharded buffer.

    Raises:
        ValueError: an unknown kind, or a negative size.
    """
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r}; there are {', '.join(KINDS)}")
    if nbytes < 0:
        raise ValueError(f"{kind} of {nbytes} bytes: a size must not be negative")
    if cluster.ranks == 1:
        return NOTHING
    if found := cluster.measured.get(kind):
        wire_time = nbytes / found.bandwidth
        return CollectiveCost(
            "measured", found.latency, wire_time, found.load, found.stretch, found.wakeup, found.launch, found.call
        )
    candidates = [algorithm(cluster, kind, nbytes) for algorithm in _ALGORITHMS[kind]]
    return min(candidates, key=lambda cost: (cost.seconds, cost.algorithm))


def averaged_over_replicas(
    reduction: CollectiveCost, shards: Cluster, replicas: Cluster, nbytes: float, *, beside: bool
) -> tuple[CollectiveCost, CollectiveCost]:
    """What a reduction among shards costs that is averaged over replicas: on the shards' own links, and on others
    afterwards, which may be nothing.

    Args:
        reduction: without the average.
        shards: the ranks that it is a reduction among.
        replicas: those that hold the same shard.
        nbytes: of a rank's part of what was reduced.
        beside: whether it may be averaged while something else is reduced, within nodes.
    """
    average = collective_cost(replicas, ALL_REDUCE, nbytes)
    if beside and shards.nodes == 1 < replicas.nodes:
        return reduction, average
    joined = replace(
        reduction,
        latency=reduction.latency + average.latency,
        wire_time=reduction.wire_time + average.wire_time,
        load=max(reduction.load, average.load),
        call=reduction.call + average.call,
    )
    return joined, NOTHING


def _cost(cluster: Cluster, algorithm: str, steps: tuple[float, float], wire_time: float) -> CollectiveCost:
    within, between = steps
    latency = cluster.start + within * cluster.within.latency + between * cluster.between.latency
    used = [cluster.within] * (cluster.local_ranks > 1) + [cluster.between] * (cluster.nodes > 1)
    return CollectiveCost(algorithm, latency, wire_time, max(link.load for link in used), call=cluster.call)


def _ring(cluster: Cluster, kind: str, nbytes: float) -> CollectiveCost:
    """One ring through all ranks for each adapter of a node; each rank passes on all but its own part.

    An all-reduce is a reduce-scatter and an all-gather. The two classes of links work at the same time.
    """
    rounds = 2 if kind == ALL_REDUCE else 1
    between = cluster.nodes - 1
    within = cluster.ranks - 1 - between
    sent = rounds * nbytes * (cluster.ranks - 1) / cluster.ranks
    wire_time = max(
        cluster.within.seconds(sent) if cluster.local_ranks > 1 else 0.0,
        cluster.between.seconds(sent / cluster.last_ranks) if cluster.nodes > 1 else 0.0,
    )
    return _cost(cluster, "ring", (rounds * within, rounds * between), wire_time)


def _tree(cluster: Cluster, kind: str, nbytes: float) -> CollectiveCost:
    """Two binary trees over the nodes, each with half of the data, and a chain in each node; up, then down."""
    local, nodes = cluster.local_ranks, cluster.nodes
    wire_time = max(
        cluster.within.seconds(2 * nbytes) if local > 1 else 0.0,
        cluster.between.seconds(2 * nbytes / cluster.last_ranks) if nodes > 1 else 0.0,
    )
    return _cost(cluster, "tree", (2 * (local - 1), 2 * math.ceil(math.log2(nodes))), wire_time)


def _pairwise(cluster: Cluster, kind: str, nbytes: float) -> CollectiveCost:
    """Each rank sends each other rank its part; the two classes of links work at the same time."""
    local, ranks = cluster.local_ranks, cluster.ranks
    wire_time = max(
        cluster.within.seconds(nbytes * (local - 1) / ranks),
        cluster.between.seconds(nbytes * (ranks - cluster.last_ranks) / ranks),
    )
    return _cost(cluster, "pairwise", (local - 1, cluster.nodes - 1), wire_time)


_ALGORITHMS: dict[str, tuple[Callable[[Cluster, str, float], CollectiveCost], ...]] = {
    ALL_GATHER: (_ring,),
    REDUCE_SCATTER: (_ring,),
    ALL_REDUCE: (_ring, _tree),
    ALL_TO_ALL: (_pairwise,),
}
