"""The operators that stand for a unit's communication in graphs.

In a joint forward-backward graph a collective is one operator with a result, ``vescale::all_gather``,
``vescale::pack`` and ``vescale::reduce_scatter``: what is partitioned, and may be repeated in the backward, moves as
one, and says which unit it belongs to. Called directly they do what they say, one after another.

In the partitioned graphs a collective is a launch into a buffer and a wait, which return nothing:
``vescale::start_all_gather``, ``vescale::wait_all_gather``, ``vescale::start_reduce_scatter`` and
``vescale::wait_reduce_scatter``. A gather for the backward may be launched by ``vescale::carry_all_gather`` while the
forward ends, and is waited for by ``vescale::take_all_gather``. Gradients are written where they will be reduced, by
``vescale::matmul_into``, ``vescale::embedding_into`` and PyTorch's own operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals import resolve_group
from .collectives import Pending, scratch_numel
from .collectives import start_all_gather as _start_all_gather
from .collectives import start_reduce_scatter as _start_reduce_scatter

_LIBRARY = torch.library.Library("vescale", "DEF")

_RELIABLE = 2  # times in a row that a backward must follow its forward for gathers to be carried from one to the other

_in_flight: dict[int, Pending] = {}


@dataclass
class _Crossing:
    """What the last forward carries over to a backward, of one dtype and device.

    Attributes:
        source: whose values; None if there is nothing, or it was taken.
        pending: their gather; None if it was not launched.
        full: where they go, kept from being freed meanwhile.
        taken: how often in a row the backward that came next was the one that was expected.
    """

    source: tuple[int, int] | None = None
    pending: Pending | None = None
    full: Tensor | None = None
    taken: int = _RELIABLE

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        self.source = self.pending = self.full = None


_crossings: defaultdict[tuple[torch.dtype, torch.device], _Crossing] = defaultdict(_Crossing)


@torch.no_grad()
def _all_gather(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    """Gathers ``shard`` [S] of every rank into [world_size * S]. ``unit`` only names the graph input."""
    full = shard.new_empty(shard.numel() * world_size)
    _start_all_gather(shard, full, resolve_group(group)).wait()
    return full


@torch.no_grad()
def _pack(
    grads: Sequence[Tensor], offsets: Sequence[int], views: Sequence[int], numel: int, dtype: torch.dtype, unit: int
) -> Tensor:
    """Lays gradients out in a buffer of ``numel`` elements, each from its offset on; what lies between is undefined.

    Args:
        grads: gradients, in the order of their offsets.
        offsets: first element of each in the buffer.
        views: which of the unit's views each is the gradient of; the others have none. Only for passes.
        numel: elements of the buffer, [world_size * S].
        dtype: of the buffer.
        unit: ordinal of the unit among the graph's inputs. Only for passes.
    """
    packed = grads[0].new_empty(numel, dtype=dtype)
    for grad, offset in zip(grads, offsets, strict=True):
        packed.narrow(0, offset, grad.numel()).view(grad.shape).copy_(grad)
    return packed


@torch.no_grad()
def _reduce_scatter(full: Tensor, unit: int, group: str, replicas: str) -> Tensor:
    """Averages ``full`` [world_size * S] over the ranks, and over replicas, and returns this rank's [S]."""
    ranks = resolve_group(group)
    shard = full.new_empty(full.numel() // ranks.size())
    scratch = full.new_empty(scratch_numel(shard.numel(), full.device, ranks))
    _start_reduce_scatter(full, shard, scratch, ranks, _replicas(replicas)).wait()
    return shard


def _start_gather(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
    _launched(full, _start_all_gather(shard, full, resolve_group(group)))


def _start_reduce(full: Tensor, shard: Tensor, scratch: Tensor, unit: int, group: str, replicas: str) -> None:
    _launched(full, _start_reduce_scatter(full, shard, scratch, resolve_group(group), _replicas(replicas)))


def _launched(full: Tensor, pending: Pending) -> None:
    if _in_flight.setdefault(full.data_ptr(), pending) is not pending:
        raise AssertionError("a collective was launched on a buffer that is in flight")


def _carry_gather(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
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
        crossing.pending = _start_all_gather(shard, full, resolve_group(group))
        crossing.full = full


def _take_gather(shard: Tensor, full: Tensor, unit: int, group: str) -> None:
    """Waits for the gather of these values that a forward launched. If there is none, because another forward came in
    between, or the values have changed, or were taken before, they are gathered now. It is so on every rank."""
    crossing = _crossings[full.dtype, full.device]
    expected = crossing.source == _values_of(shard)
    there = expected and crossing.full is not None and crossing.full.data_ptr() == full.data_ptr()
    crossing.finish()
    crossing.taken += expected
    if not there:
        _start_all_gather(shard, full, resolve_group(group)).wait()


def forget_carried() -> None:
    """Waits for all that forwards have launched for backwards; a backward that still comes gathers by itself."""
    for crossing in _crossings.values():
        crossing.finish()


def _values_of(shard: Tensor) -> tuple[int, int]:
    """Names what a shard holds: every write to it, or to a parameter in it, counts its version up."""
    return shard.data_ptr(), shard._version


def _wait_gather(full: Tensor, unit: int) -> None:
    _in_flight.pop(full.data_ptr()).wait()


def _wait_reduce(full: Tensor, shard: Tensor, scratch: Tensor, unit: int) -> None:
    _in_flight.pop(full.data_ptr()).wait()


def _replicas(group: str) -> dist.ProcessGroup | None:
    return resolve_group(group) if group else None


def _matmul_into(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """``out = a @ b``, or ``out += a @ b``: matrices, or batches of matrices of the same dtype."""
    if accumulate:
        (out.addmm_ if a.dim() == 2 else out.baddbmm_)(a, b)
    else:
        (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=out)


def _embedding_into(out: Tensor, grad: Tensor, indices: Tensor, padding_idx: int) -> None:
    """The gradient of ``torch.nn.functional.embedding`` with respect to its weight ``out`` [rows, dim].

    As aten.embedding_dense_backward without scale_grad_by_freq, row by row in the order of ``indices``.
    """
    out.zero_()
    rows, grads = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if padding_idx >= 0:
        kept = rows != padding_idx
        rows, grads = rows[kept], grads[kept]
    out.index_add_(0, rows, grads)


def _returns_nothing(*args: object) -> None:
    pass


def _all_gather_fake(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    return shard.new_empty(shard.numel() * world_size)


def _pack_fake(
    grads: Sequence[Tensor], offsets: Sequence[int], views: Sequence[int], numel: int, dtype: torch.dtype, unit: int
) -> Tensor:
    return grads[0].new_empty(numel, dtype=dtype)


def _reduce_scatter_fake(full: Tensor, unit: int, group: str, replicas: str) -> Tensor:
    return full.new_empty(full.numel() // resolve_group(group).size())


for _schema, _run, _fake in (
    ("all_gather(Tensor shard, int unit, int world_size, str group) -> Tensor", _all_gather, _all_gather_fake),
    (
        "pack(Tensor[] grads, int[] offsets, int[] views, int numel, ScalarType dtype, int unit) -> Tensor",
        _pack,
        _pack_fake,
    ),
    (
        "reduce_scatter(Tensor full, int unit, str group, str replicas) -> Tensor",
        _reduce_scatter,
        _reduce_scatter_fake,
    ),
    ("start_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _start_gather, _returns_nothing),
    ("wait_all_gather(Tensor(a!) full, int unit) -> ()", _wait_gather, _returns_nothing),
    ("carry_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _carry_gather, _returns_nothing),
    ("take_all_gather(Tensor shard, Tensor(a!) full, int unit, str group) -> ()", _take_gather, _returns_nothing),
    (
        "start_reduce_scatter(Tensor(a!) full, Tensor(b!) shard, Tensor(c!) scratch, int unit, str group, "
        "str replicas) -> ()",
        _start_reduce,
        _returns_nothing,
    ),
    (
        "wait_reduce_scatter(Tensor(a!) full, Tensor(b!) shard, Tensor(c!) scratch, int unit) -> ()",
        _wait_reduce,
        _returns_nothing,
    ),
    ("matmul_into(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()", _matmul_into, _returns_nothing),
    (
        "embedding_into(Tensor(a!) out, Tensor grad, Tensor indices, int padding_idx) -> ()",
        _embedding_into,
        _returns_nothing,
    ),
):
    # flexible_layout: Inductor need not copy an operand to give it the strides it had while tracing.
    _LIBRARY.define(_schema, tags=(torch.Tag.flexible_layout,))
    _name = _schema.partition("(")[0]
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vescale::{_name}", _fake, lib=_LIBRARY)

all_gather = torch.ops.vescale.all_gather.default
pack = torch.ops.vescale.pack.default
reduce_scatter = torch.ops.vescale.reduce_scatter.default
start_all_gather = torch.ops.vescale.start_all_gather.default
wait_all_gather = torch.ops.vescale.wait_all_gather.default
carry_all_gather = torch.ops.vescale.carry_all_gather.default
take_all_gather = torch.ops.vescale.take_all_gather.default
start_reduce_scatter = torch.ops.vescale.start_reduce_scatter.default
wait_reduce_scatter = torch.ops.vescale.wait_reduce_scatter.default
matmul_into = torch.ops.vescale.matmul_into.default
embedding_into = torch.ops.vescale.embedding_into.default
