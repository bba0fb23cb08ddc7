"""The operators of a unit's communication: ``vescale::all_gather``, ``vescale::pack``, ``vescale::reduce_scatter``.

A joint forward-backward graph is partitioned, and its gathers may be repeated in the backward. One operator
for the launch and the wait of a collective moves as one, and carries its unit with it; one for packing says
which gradient goes where. The ``expand`` pass replaces them by PyTorch's own operators once the graphs are
partitioned; called directly they do the same, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("vescale", "DEF")
_LIBRARY.define("all_gather(Tensor shard, int unit, int world_size, str group) -> Tensor")
_LIBRARY.define("pack(Tensor[] grads, int[] offsets, int[] views, int numel, ScalarType dtype, int unit) -> Tensor")
_LIBRARY.define("reduce_scatter(Tensor full, int unit, str reduce_op, int world_size, str group) -> Tensor")

_functional = torch.ops._c10d_functional


def _all_gather(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    """Gathers ``shard`` [S] of every rank into [world_size * S]. ``unit`` only names the graph input."""
    return _functional.wait_tensor(_functional.all_gather_into_tensor(shard, world_size, group))


def pack_by_cat(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    views: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    unit: int,
) -> Tensor:
    """Lays gradients out in a buffer of ``numel`` elements, each from its offset on, with zeros between them.

    Args:
        grads: gradients, in the order of their offsets.
        offsets: first element of each in the buffer.
        views: which of the unit's views each is the gradient of; the others have none. Only for passes.
        numel: elements of the buffer, [world_size * S].
        dtype: of the buffer.
        unit: ordinal of the unit among the graph's inputs. Only for passes.
    """
    pieces: list[Tensor] = []
    end = 0
    for grad, offset in zip(grads, offsets, strict=True):
        if offset > end:
            pieces.append(grad.new_zeros(offset - end, dtype=dtype))
        pieces.append(grad.reshape(-1).to(dtype))
        end = offset + grad.numel()
    if numel > end:
        pieces.append(grads[-1].new_zeros(numel - end, dtype=dtype))
    return torch.cat(pieces)


def _reduce_scatter(full: Tensor, unit: int, reduce_op: str, world_size: int, group: str) -> Tensor:
    """Reduces ``full`` [world_size * S] over the ranks and returns this rank's [S]."""
    return _functional.wait_tensor(
        _functional.reduce_scatter_tensor(full, reduce_op, world_size, group),
    )


_LIBRARY.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
_LIBRARY.impl("pack", pack_by_cat, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_scatter", _reduce_scatter, "CompositeExplicitAutograd")


@torch.library.register_fake("vescale::all_gather", lib=_LIBRARY)
def _all_gather_fake(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    return shard.new_empty(shard.numel() * world_size)


@torch.library.register_fake("vescale::pack", lib=_LIBRARY)
def _pack_fake(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    views: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    unit: int,
) -> Tensor:
    return grads[0].new_empty(numel, dtype=dtype)


@torch.library.register_fake("vescale::reduce_scatter", lib=_LIBRARY)
def _reduce_scatter_fake(full: Tensor, unit: int, reduce_op: str, world_size: int, group: str) -> Tensor:
    return full.new_empty(full.numel() // world_size)


all_gather = torch.ops.vescale.all_gather.default
pack = torch.ops.vescale.pack.default
reduce_scatter = torch.ops.vescale.reduce_scatter.default
