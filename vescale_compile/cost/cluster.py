"""Clusters: a device, how many of them, and the links between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vescale_compile.cost.devices import Device, device


@dataclass(frozen=True)
class Link:
    """One class of links, as each rank sees it.

    Attributes:
        name: for reports.
        bandwidth: bytes/s that a rank can send, and receive at the same time.
        latency: seconds of one step of a collective over the link, whatever it carries.
        efficiency: share of the bandwidth that collectives reach, in (0, 1].
        load: share of the compute device that a collective takes while it uses the link, in [0, 1).
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float = 1.0
    load: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"link {self.name!r}: bandwidth is {self.bandwidth} bytes/s; it must be positive")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"link {self.name!r}: latency is {self.latency} s; it must not be negative")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"link {self.name!r}: efficiency is {self.efficiency}; it must be in (0, 1]")
        if not 0 <= self.load < 1:
            raise ValueError(f"link {self.name!r}: load is {self.load}; it must be in [0, 1)")

    def seconds(self, nbytes: float) -> float:
        """Time in which one rank sends ``nbytes`` over the link, latency apart."""
        return nbytes / (self.bandwidth * self.efficiency)


@dataclass(frozen=True)
class MeasuredCollective:
    """A kind of collective as measured on the cluster: one of many in a row takes ``latency + nbytes / bandwidth``.

    Attributes:
        bandwidth: bytes/s of the unsharded buffer.
        load: share of the compute device that computation beside it loses to it, in [0, 1).
        stretch: how many times longer it takes while the device computes beside it, at least 1.
        wakeup: seconds that it takes longer if it does not follow another without a pause.
        launch: seconds for which the launch of one of middling size keeps a CPU from computing; a GPU goes on.
        call: seconds that a GPU's host takes to launch one, and to have what follows wait for it.
    """

    latency: float
    bandwidth: float
    load: float = 0.0
    stretch: float = 1.0
    wakeup: float = 0.0
    launch: float = 0.0
    call: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes.

    Attributes:
        device: of each rank.
        ranks: that shard the parameters together.
        ranks_per_node: that ``within`` connects. Nodes are alike, but the last may have fewer ranks.
        within: the link between the ranks of a node.
        between: the link between nodes; its bandwidth is what each rank has of it.
        start: seconds from the launch of a collective to its first step.
        call: seconds that the host of a GPU takes to launch a collective, and to have what follows wait for it.
        measured: by kind, collectives measured on this very cluster, which are believed before the model.

    Raises:
        ValueError: numbers of ranks that make no cluster.
    """

    device: Device
    ranks: int
    ranks_per_node: int
    within: Link
    between: Link
    start: float = 0.0
    call: float = 0.0
    measured: Mapping[str, MeasuredCollective] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"a cluster of {self.ranks} ranks, {self.ranks_per_node} per node: both must be at least 1"
            )

    def __str__(self) -> str:
        links = [self.within.name] * (self.local_ranks > 1) + [self.between.name] * (self.nodes > 1)
        over = f" over {' and '.join(dict.fromkeys(links))}" if links else ""
        measured = ", collectives as measured" if self.measured else ""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.ranks} x {self.device.name} on {nodes}{over}{measured}"

    @property
    def local_ranks(self) -> int:
        """Ranks of a node that take part, on every node but the last."""
        return min(self.ranks, self.ranks_per_node)

    @property
    def nodes(self) -> int:
        """Nodes that take part."""
        return math.ceil(self.ranks / self.local_ranks)

    def of(self, ranks: int, *, stride: int = 1) -> Cluster:
        """So many ranks, each ``stride`` after the one before, on nodes like these. No collective was measured between
        them, unless they are all of this cluster's."""
        if (ranks, stride) == (self.ranks, 1):
            return self
        return replace(self, ranks=ranks, ranks_per_node=max(1, self.ranks_per_node // stride), measured={})

    @property
    def last_ranks(self) -> int:
        """Ranks of the last node. What goes through all nodes has no more adapters than this one."""
        return self.ranks - (self.nodes - 1) * self.local_ranks


# NCCL's own model of a ring in its Simple protocol (src/graph/tuning.cc): 8.4 us to start, 3.4 us for each step over
# NVLink and 14 us for each over the network.
_START, _NVLINK_STEP, _NETWORK_STEP = 8.4e-6, 3.4e-6, 14e-6

# What a host takes to launch one of nccl's collectives on a stream of its own: it fits steps on one H200, where nothing
# is sent (bench/results/2026-11-28-h200.md).
_CALL = 100e-6

# What collectives reach of a link's bandwidth: 0.75 of NVLink is what the all-gathers of veScale-FSDP's table
# (arXiv 2602.22437, 64 H800) come to, and nccl-tests shows on A100 and H100; 0.9 of the network is an assumption.
_NVLINK_EFFICIENCY, _NETWORK_EFFICIENCY = 0.75, 0.9

# Per GPU: bytes/s over NVLink or Infinity Fabric in one direction (datasheets), and Gbit/s of network.
_NODES: dict[str, tuple[float, float]] = {
    "a100": (300e9, 200),
    "h100": (450e9, 400),
    "h800": (200e9, 400),
    "h200": (450e9, 400),
    "b200": (900e9, 400),
    "mi300x": (448e9, 400),
    "a100-40gb": (300e9, 200),
}


def gpu_cluster(name: str, ranks: int) -> Cluster:
    """Nodes of 8 of one of the table's GPUs, a network adapter for each, as NVIDIA's and AMD's platforms have them.

    Args:
        name: of a device: "a100", "h100", "h800", "h200", "b200", "mi300x" or "a100-40gb".
        ranks: GPUs; the last node may have fewer than 8.

    Raises:
        ValueError: there is no such device, or there are no ranks.
    """
    unit = device(name)
    bandwidth, gigabits = _NODES[name]
    within = Link("Infinity Fabric" if name == "mi300x" else "NVLink", bandwidth, _NVLINK_STEP, _NVLINK_EFFICIENCY)
    between = Link("network", gigabits * 1e9 / 8, _NETWORK_STEP, _NETWORK_EFFICIENCY)
    return Cluster(unit, ranks, 8, within, between, start=_START, call=_CALL)


def wire_cluster(
    unit: Device,
    hosts: int,
    gigabits: float,
    *,
    latency: float = 200e-6,
    load: float = 0.2,
    measured: Mapping[str, MeasuredCollective] | None = None,
) -> Cluster:
    """Hosts of one rank on a plain network with gloo, where communication costs CPU time.

    Args:
        unit: the hosts' CPU, from a calibration.
        hosts: ranks, one on each host.
        gigabits: Gbit/s of each host, each way.
        latency: seconds of one step of a collective.
        load: share of the CPU that communication takes while it runs.
        measured: collectives measured on these hosts.
    """
    wire = Link("wire", gigabits * 1e9 / 8, latency, 0.95, load)
    return Cluster(unit, hosts, 1, wire, wire, start=latency, measured=measured or {})


PRESETS: dict[str, Callable[[int], Cluster]] = {name: functools.partial(gpu_cluster, name) for name in _NODES}
"""Clusters by name, each for a number of ranks."""
