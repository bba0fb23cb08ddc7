"""Ranks on the GPUs that a machine has, or seems to have."""

import os
from dataclasses import replace
from typing import NamedTuple

import torch

from vescale_compile.cost import Cluster
from vescale_compile.report import Report


class Launch(NamedTuple):
    """A collective of a schedule."""

    kind: str
    numel: int
    """of a shard"""
    with_the_next: bool
    """whether the next one is joined to it"""


def launches(report: Report) -> list[Launch]:
    """The collectives of a step in the order of its schedule."""
    found = []
    for graph in report.graphs:
        shards = {unit.name: unit.shard_bytes // torch.float32.itemsize for unit in graph.units}
        for event in (event for part in graph.parts.values() for event in part.schedule):
            verb, kind, _, unit = event.removesuffix(", with the next").split(" ", 3)
            if verb in ("launch", "carry"):
                found.append(Launch(kind, shards[unit], event.endswith(", with the next")))
    return found


def at_once(cluster: Cluster) -> Cluster:
    """With hosts that launch in no time, so that no collectives are joined for their sake."""
    return replace(cluster, call=0.0, device=replace(cluster.device, issue=0.0))


def take_gpu(rank: int, world_size: int) -> torch.device:
    """Gives this rank a GPU, which others share where there are fewer GPUs than ranks; before its process group is
    made."""
    gpus = torch.cuda.device_count()
    if world_size > gpus:
        # NCCL refuses two ranks of a host on one GPU, unless each says that it is a host of its own.
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device
