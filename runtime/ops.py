"""``vescale::all_gather`` and ``vescale::reduce_scatter``: one node for each collective in a joint graph.

A joint forward-backward graph is partitioned, and its gathers may be repeated in the backward. One operator
for launch and wait together moves as one, and carries its unit with it. The ``expand`` pass replaces both by
PyTorch's functional collectives (``torch.ops._c10d_functional``) once the graphs are partitioned; called
directly they do the same, one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("vescale", "DEF")
_LIBRARY.define("all_gather(Tensor shard, int unit, int world_size, str group) -> Tensor")
_LIBRARY.define("reduce_scatter(Tensor full, int unit, str reduce_op, int world_size, str group) -> Tensor")

_functional = torch.ops._c10d_functional


def _all_gather(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    """Gathers ``shard`` [S] of every rank into [world_size * S]. ``unit`` only names the graph input."""
    return _functional.wait_tensor(_functional.all_gather_into_tensor(shard, world_size, group))


def _reduce_scatter(full: Tensor, unit: int, reduce_op: str, world_size: int, group: str) -> Tensor:
    """Reduces ``full`` [world_size * S] over the ranks and returns this rank's [S]."""
    return _functional.wait_tensor(
        _functional.reduce_scatter_tensor(full, reduce_op, world_size, group),
    )


_LIBRARY.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_scatter", _reduce_scatter, "CompositeExplicitAutograd")


@torch.library.register_fake("vescale::all_gather", lib=_LIBRARY)
def _all_gather_fake(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    return shard.new_empty(shard.numel() * world_size)


@torch.library.register_fake("vescale::reduce_scatter", lib=_LIBRARY)
def _reduce_scatter_fake(full: Tensor, unit: int, reduce_op: str, world_size: int, group: str) -> Tensor:
    return full.new_empty(full.numel() // world_size)


all_gather = torch.ops.vescale.all_gather.default
reduce_scatter = torch.ops.vescale.reduce_scatter.default
