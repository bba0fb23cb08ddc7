"""Gathers that the forward launches for the backward: in flight while the forward and the loss end.

``vescale::carry_all_gather`` launches one, into a slot that nothing else uses, and ``vescale::take_all_gather`` waits
for it; ``vescale::carry_all_gather_quantized`` and ``vescale::take_all_gather_quantized`` do so with codes and scales,
which the backward dequantizes. A gather is a collective, so whether it is repeated must be the same on every rank: that
follows from the order of forwards and backwards alone. The values of a shard can't say it. Not every write to them is
counted by the tensor that is read here, and a rank that holds nothing of a unit may not write at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_internals.autograd import profiled_to_the_end
from .collectives import Pending, start_all_gather
from .groups import group_named
from .life import Life, life
from .ops import define
from .quantized_ops import start_quantized_gather

_Start = Callable[[Tensor, Tensor, dist.ProcessGroup], Pending]  # of a shard's gather into a buffer

_RELIABLE = 2  # times in a row that a backward must follow its forward for gathers to be carried from one to the other


@dataclass
class _Crossing:
    """What the last forward carries over to a backward, of one dtype, device and process group.

    Attributes:
        source: the shard's memory; None if there is nothing, or it was taken. No other memory is equal to one that is
            referred to, though it may be freed.
        pending: its gather; None if it was not launched, or is over.
        full: where it goes, kept from being freed meanwhile; None if it was not launched.
        taken: how often the backward that was expected came, since one did not.
    """

    source: StorageWeakRef | None = None
    pending: Pending | None = None
    full: Tensor | None = None
    taken: int = _RELIABLE

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        self.source = self.pending = self.full = None


_Crossings = defaultdict[tuple[torch.dtype, torch.device, str], _Crossing]
_crossings: WeakKeyDictionary[Life, _Crossings] = WeakKeyDictionary()


def _crossing_into(full: Tensor, group: str) -> _Crossing:
    of_life = _crossings.setdefault(life(), defaultdict(_Crossing))
    return of_life[full.dtype, full.device, group]


def _carry_into(full: Tensor, shard: Tensor, group: str, start: _Start) -> None:
    """Launches a gather that the backward takes.

    Where another forward comes before that backward (of a graph that serves several layers, say, or one whose loss was
    dropped), what the first one carried was for nothing: values may have changed since. Then none is launched until
    backwards follow their forwards again.
    """
    crossing = _crossing_into(full, group)
    if crossing.source is not None:
        crossing.taken = 0
    crossing.finish()
    crossing.source = StorageWeakRef(shard.untyped_storage())
    if crossing.taken >= _RELIABLE:
        crossing.pending = start(shard, full, group_named(group))
        crossing.full = full
        if profiled_to_the_end(full.device):
            crossing.pending.wait()
            crossing.pending = None


def _take_into(full: Tensor, shard: Tensor, group: str, start: _Start) -> None:
    """Waits for the gather that the last forward launched. If that forward was another's, or launched none, or its
    gather was taken before, the shard is gathered now."""
    crossing = _crossing_into(full, group)
    source = crossing.source
    expected = source is not None and source == StorageWeakRef(shard.untyped_storage())
    carried = crossing.full if expected else None
    crossing.finish()
    if source is not None:
        crossing.taken = crossing.taken + 1 if expected else 0
    if carried is None:
        start(shard, full, group_named(group)).wait()
    elif carried.data_ptr() != full.data_ptr():  # a graph that wanted a larger slot has been called since
        full.copy_(carried)


def forget_carried() -> None:
    """Waits for all that forwards have launched for backwards; a backward that still comes gathers by itself."""
    for of_life in _crossings.values():
        for crossing in of_life.values():
            crossing.finish()


def _carry(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
    _carry_into(full, shard, group, start_all_gather)


def _take(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
    _take_into(full, shard, group, start_all_gather)


def _carry_quantized(shard: Tensor, packed: Tensor, unit: int, group: str, packing: str, compiled: bool) -> None:
    _carry_into(packed, shard, group, partial(start_quantized_gather, packing=packing, compiled=compiled))


def _take_quantized(shard: Tensor, packed: Tensor, unit: int, group: str, packing: str, compiled: bool) -> None:
    _take_into(packed, shard, group, partial(start_quantized_gather, packing=packing, compiled=compiled))


_QUANTIZED = "(Tensor shard, Tensor(a!) packed, int unit, str group, str packing, bool compiled) -> ()"

define("carry_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _carry)
define("take_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _take)
define(f"carry_all_gather_quantized{_QUANTIZED}", _carry_quantized)
define(f"take_all_gather_quantized{_QUANTIZED}", _take_quantized)

carry_all_gather = torch.ops.vescale.carry_all_gather.default
take_all_gather = torch.ops.vescale.take_all_gather.default
carry_all_gather_quantized = torch.ops.vescale.carry_all_gather_quantized.default
take_all_gather_quantized = torch.ops.vescale.take_all_gather_quantized.default
