"""Gathers that the forward launches for the backward: in flight while the forward and the loss end.

``vescale::carry_all_gather`` launches one, into a slot that nothing else uses, and ``vescale::take_all_gather`` stands
in the backward where its launch would, if it were not in flight already; ``vescale::wait_all_gather`` waits for it.
``vescale::carry_all_gather_quantized`` and ``vescale::take_all_gather_quantized`` do so with codes and scales. A gather
is a collective, so whether it is repeated must be the same on every rank: that follows from the order of forwards and
backwards alone. The values of a shard can't say it. Not every write to them is counted by the tensor that is read
here, and a rank that holds nothing of a unit may not write at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_internals import profiled_to_the_end, resolve_group
from .agreement import Life, life
from .collectives import DONE, Pending, start_all_gather
from .ops import define, launched
from .quantized_ops import start_quantized_gather

_Start = Callable[[Tensor, Tensor, dist.ProcessGroup], Pending]  # of a shard's gather into a buffer

_RELIABLE = 2  # times in a row that a backward must follow its forward for gathers to be carried from one to the other


class _Source(NamedTuple):
    """A shard. No other memory is equal to one that is referred to, though it may be freed."""

    memory: StorageWeakRef
    offset: int

    @classmethod
    def of(cls, shard: Tensor) -> _Source:
        return cls(StorageWeakRef(shard.untyped_storage()), int(shard.storage_offset()))


class _Gather(NamedTuple):
    """One in flight or over, and the buffer that it fills, which is not freed meanwhile."""

    pending: Pending
    full: Tensor


@dataclass
class _Crossing:
    """What the last forward carries over to a backward, on one device and process group.

    Attributes:
        gathers: by shard, those that the backward has not taken yet; None for one that was not launched.
        taken: how often the backward that was expected came, since one did not.
    """

    gathers: dict[_Source, _Gather | None] = field(default_factory=dict)
    taken: int = _RELIABLE

    def drop(self) -> None:
        for gather in self.gathers.values():
            if gather is not None:
                gather.pending.wait()
        self.gathers.clear()


_Crossings = defaultdict[tuple[torch.device, str], _Crossing]
_crossings: WeakKeyDictionary[Life, _Crossings] = WeakKeyDictionary()


def _crossing_on(device: torch.device, group: str) -> _Crossing:
    of_life = _crossings.setdefault(life(), defaultdict(_Crossing))
    return of_life[device, group]


def _carry_into(full: Tensor, shard: Tensor, group: str, first: bool, start: _Start) -> None:
    """Launches a gather that the backward takes; ``first`` of those that its forward carries over on this group.

    Where another forward comes before that backward (of a graph that serves several layers, say, or one whose loss was
    dropped), what the first one carried was for nothing: values may have changed since. Then none is launched until
    backwards follow their forwards again.
    """
    crossing = _crossing_on(full.device, group)
    if first and crossing.gathers:
        crossing.taken = 0
        crossing.drop()
    gather = None
    if crossing.taken >= _RELIABLE:
        gather = _Gather(start(shard, full, resolve_group(group)), full)
        if profiled_to_the_end(full.device):
            gather.pending.wait()
            gather = gather._replace(pending=DONE)
    crossing.gathers[_Source.of(shard)] = gather


def _take_into(full: Tensor, shard: Tensor, group: str, start: _Start) -> None:
    """Takes over the gather that the last forward launched. If that forward was another's, or launched none, or its
    gather was taken before, it is launched now."""
    crossing, source = _crossing_on(full.device, group), _Source.of(shard)
    if source not in crossing.gathers:
        crossing.drop()
        gather = None
    else:
        gather = crossing.gathers.pop(source)
        crossing.taken += not crossing.gathers
    if gather is None:
        pending = start(shard, full, resolve_group(group))
    elif gather.full.data_ptr() == full.data_ptr():
        pending = gather.pending
    else:  # a graph that wanted a larger slot has been called since
        gather.pending.wait()
        full.copy_(gather.full)
        pending = DONE
    launched(full, pending)


def forget_carried() -> None:
    """Waits for all that forwards have launched for backwards; a backward that still comes gathers by itself."""
    for of_life in _crossings.values():
        for crossing in of_life.values():
            crossing.drop()


def _carry(shard: Tensor, full: Tensor, unit: int, group: str, first: bool) -> None:
    _carry_into(full, shard, group, first, start_all_gather)


def _take(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
    _take_into(full, shard, group, start_all_gather)


def _carry_quantized(
    shard: Tensor, packed: Tensor, unit: int, group: str, packing: str, compiled: bool, first: bool
) -> None:
    start = partial(start_quantized_gather, packing=packing, compiled=compiled)
    _carry_into(packed, shard, group, first, start)


def _take_quantized(shard: Tensor, packed: Tensor, unit: int, group: str, packing: str, compiled: bool) -> None:
    _take_into(packed, shard, group, partial(start_quantized_gather, packing=packing, compiled=compiled))


_QUANTIZED = "Tensor shard, Tensor(a!) packed, int unit, str group, str packing, bool compiled"

define("carry_all_gather(Tensor shard, Tensor(a!) full, int unit, str group, bool first) -> ()", _carry)
define("take_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _take)
define(f"carry_all_gather_quantized({_QUANTIZED}, bool first) -> ()", _carry_quantized)
define(f"take_all_gather_quantized({_QUANTIZED}) -> ()", _take_quantized)

carry_all_gather = torch.ops.vescale.carry_all_gather.default
take_all_gather = torch.ops.vescale.take_all_gather.default
carry_all_gather_quantized = torch.ops.vescale.carry_all_gather_quantized.default
take_all_gather_quantized = torch.ops.vescale.take_all_gather_quantized.default
