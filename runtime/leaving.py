"""The operators by which a backward leaves its last reductions in flight.

``vescale::leave_reduce_scatter`` and ``vescale::leave_reduce_scatter_quantized`` stand where the waits would, and take
what those take. ``vescale::cast_when_read`` stands for the cast of what such a reduction returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arrivals import arrival_of, leave
from .ops import define, in_flight_on


def _leave(full: Tensor, shard: Tensor, scratch: Tensor, unit: int) -> None:
    pending = in_flight_on(full)
    leave(shard, (full, scratch), lambda: pending.wait())


def _leave_quantized(shard: Tensor, sent: Tensor, received: Tensor, unit: int) -> None:
    pending = in_flight_on(received)
    leave(shard, (sent, received), lambda: pending.wait())


def _cast_when_read(shard: Tensor, result: Tensor, unit: int) -> None:
    arrival = arrival_of(shard)

    def finish() -> None:
        if arrival is not None:
            arrival.wait()
        result.copy_(shard)

    leave(result, (shard,), finish)


define(
    "leave_reduce_scatter(Tensor(a!) full, Tensor(b!) shard, Tensor(c!) scratch, int unit) -> ()",
    _leave,
)
define(
    "leave_reduce_scatter_quantized(Tensor(a!) shard, Tensor(b!) sent, Tensor(c!) received, int unit) -> ()",
    _leave_quantized,
)
define("cast_when_read(Tensor(a!) shard, Tensor(b!) result, int unit) -> ()", _cast_when_read)

leave_reduce_scatter = torch.ops.vescale.leave_reduce_scatter.default
leave_reduce_scatter_quantized = torch.ops.vescale.leave_reduce_scatter_quantized.default
cast_when_read = torch.ops.vescale.cast_when_read.default
