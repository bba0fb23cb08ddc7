"""Parameters of a unit that not every rank uses: an expert that got no tokens, a branch that was not taken.

As with DistributedDataParallel(find_unused_parameters=True), a parameter that has a gradient on one rank gets one on
all. A rank that did not use it has sent zeros.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist

from ..torch_internals import resolve_group
from .dbuffer import DBuffer

_sets_in_graphs: defaultdict[str, set[frozenset[int]]] = defaultdict(set)


def add_graph(layout: str, used: set[int]) -> None:
    """Takes down for which parameters of a unit a graph, on which all ranks have agreed, computes gradients."""
    _sets_in_graphs[layout].add(frozenset(used))


def used_on_any_rank(buffer: DBuffer, used: set[int], *, compiled: bool = False) -> set[int]:
    """Indices of the parameters that have a gradient on any rank, where those ``used`` have one on this rank.

    A small collective, whose result is read at once; none where ranks can't differ. A unit's only parameter has a
    gradient wherever the unit has one, and so have those of a graph that all ranks run, for want of another.

    Args:
        buffer: the unit's.
        used: indices in ``buffer.params``.
        compiled: whether a graph has computed the gradients.
    """
    if len(buffer.params) == 1 or (compiled and len(_sets_in_graphs[buffer.layout]) <= 1):
        return used
    mask = torch.zeros(len(buffer.params), dtype=torch.uint8, device=buffer.shard.device)
    mask[sorted(used)] = 1
    comm = buffer.comm()
    for group in filter(None, (comm.group, comm.replicas)):
        dist.all_reduce(mask, dist.ReduceOp.MAX, resolve_group(group))
    return {index for index, anywhere in enumerate(mask.tolist()) if anywhere}
