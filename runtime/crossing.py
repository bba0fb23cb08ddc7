"""Gathers that the forward launches for the backward: in flight while the forward and the loss end.

``vescale::carry_all_gather`` launches one, into a slot that nothing else uses, and ``vescale::take_all_gather`` waits
for it. Whatever a program does between the two, a backward reads the values that its shard has when it begins: a
gather that is not there, or is of other values, is repeated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_internals import profiled_to_the_end, resolve_group
from .collectives import Pending, start_all_gather
from .ops import define

_RELIABLE = 2  # times in a row that a backward must follow its forward for gathers to be carried from one to the other

_Values = tuple[StorageWeakRef, int]
"""What a shard holds: every write to it, or to a parameter in it, counts its version up. No other storage is equal to
one that is referred to, though its memory may be freed."""


@dataclass
class _Crossing:
    """What the last forward carries over to a backward, of one dtype and device.

    Attributes:
        source: whose values; None if there is nothing, or it was taken.
        pending: their gather; None if it was not launched.
        full: where they go, kept from being freed meanwhile.
        taken: how often in a row the backward that came next was the one that was expected.
    """

    source: _Values | None = None
    pending: Pending | None = None
    full: Tensor | None = None
    taken: int = _RELIABLE

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        self.source = self.pending = self.full = None


_crossings: defaultdict[tuple[torch.dtype, torch.device], _Crossing] = defaultdict(_Crossing)


def _carry(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
    """Launches a gather that the backward takes, unless it is on its way already.

    Where another forward comes before that backward (of a graph that serves several layers, say), what the first one
    carried was for nothing. Then none is launched until backwards follow their forwards again.
    """
    crossing = _crossings[full.dtype, full.device]
    source = _values_of(shard)
    if crossing.source == source:
        return
    if crossing.source is not None:
        crossing.taken = 0
    crossing.finish()
    crossing.source = source
    if crossing.taken >= _RELIABLE:
        crossing.pending = start_all_gather(shard, full, resolve_group(group))
        crossing.full = full
        if profiled_to_the_end(full.device):
            crossing.pending.wait()
            crossing.pending = None


def _take(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
    """Waits for the gather of these values that a forward launched. If there is none, because another forward came in
    between, or the values have changed, or were taken before, they are gathered now. It is so on every rank."""
    crossing = _crossings[full.dtype, full.device]
    expected = crossing.source == _values_of(shard)
    there = expected and crossing.full is not None and crossing.full.data_ptr() == full.data_ptr()
    crossing.finish()
    crossing.taken += expected
    if not there:
        start_all_gather(shard, full, resolve_group(group)).wait()


def forget_carried() -> None:
    """Waits for all that forwards have launched for backwards; a backward that still comes gathers by itself."""
    for crossing in _crossings.values():
        crossing.finish()


def _values_of(shard: Tensor) -> _Values:
    return StorageWeakRef(shard.untyped_storage()), shard._version


define("carry_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _carry)
define("take_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _take)

carry_all_gather = torch.ops.vescale.carry_all_gather.default
take_all_gather = torch.ops.vescale.take_all_gather.default
