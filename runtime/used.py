"""Parameters of a unit that not every rank uses: an expert that got no tokens, a branch that was not taken.

As with DistributedDataParallel(find_unused_parameters=True), a parameter that has a gradient on one rank gets one on
all. A rank that did not use it has sent zeros.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .dbuffer import DBuffer
from .life import life
from .messages import CAME_TO_SOMETHING_ELSE


def add_graph(layout: str, used: set[int]) -> None:
    """Takes down for which parameters of a unit a graph, on which all ranks have agreed, computes gradients."""
    life().gradients.setdefault(layout, set()).add(frozenset(used))


def used_on_any_rank(buffer: DBuffer, used: set[int], *, compiled: bool) -> set[int]:
    """Indices of the parameters that have a gradient on any rank, where those ``used`` have one on this rank.

    A small collective, whose result a rank reads at once that lacks a gradient. None for a unit's only parameter, which
    has a gradient wherever the unit has one; and none where all graphs for units laid out like this one compute the
    same gradients.

    Args:
        buffer: the unit's.
        used: indices in ``buffer.params``.
        compiled: whether graphs have computed all of these gradients.
    """
    if len(buffer.params) == 1 or (compiled and len(life().gradients.get(buffer.layout, ())) <= 1):
        return used
    device = buffer.shard.device
    own = [index in used for index in range(len(buffer.params))]
    mask = torch.tensor(own, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    mask = mask.to(device, non_blocking=True)  # from pageable memory the host would wait for all that the GPU has to do
    for group in filter(None, (buffer.group, buffer.replicas)):
        try:
            dist.all_reduce(mask, dist.ReduceOp.MAX, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"[rank {buffer.rank}] unit {buffer.name}: waited in vain for the other ranks to say which of its "
                f"parameters they used; one of them {CAME_TO_SOMETHING_ELSE}: {error}"
            ) from error
    if all(own):  # who needs no answer does not wait for it
        return used
    return {index for index, anywhere in enumerate(mask.tolist()) if anywhere}
