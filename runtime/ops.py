"""The operators that stand for a unit's communication in graphs.

In a joint forward-backward graph a collective is one operator with a result, ``vescale::all_gather``,
``vescale::pack`` and ``vescale::reduce_scatter``: what is partitioned, and may be repeated in the backward, moves as
one, and says which unit it belongs to. Called directly they do what they say, one after another.

In the partitioned graphs a collective is a launch into a buffer and a wait, which return nothing:
``vescale::start_all_gather``, ``vescale::wait_all_gather``, ``vescale::start_reduce_scatter`` and
``vescale::wait_reduce_scatter``. A launch ``with_next`` shares a collective with the launch behind it. What a graph
gathers first, and keeps, goes to ``vescale::all_gather_memory``, because the graph before may have launched it (see
``courses.py``). Gradients are written where they will be reduced, by ``vescale::matmul_into``,
``vescale::embedding_into``, ``vescale::sum_into`` and PyTorch's own operators. The operators of quantized communication
are in ``quantized_ops.py``, those of a gather that crosses from the forward to the backward in ``crossing.py``, and
those of reductions that outlast the backward in ``leaving.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.inductor_graphs import generate_sums_into
from .collectives import Nothing, Pending, padding_is_read, scratch_numel, start_all_gathers, start_reduce_scatters
from .collectives import start_all_gather as _start_all_gather
from .collectives import start_reduce_scatter as _start_reduce_scatter
from .courses import Pairs, gather, memory_of_gather
from .groups import group_named
from .messages import tell_apart
from .reductions import add_held, held_back

_LIBRARY = torch.library.Library("vescale", "DEF")

_in_flight: dict[int, Pending] = {}
_gathers: list[tuple[Tensor, Tensor]] = []  # to be launched with the next
_reductions: list[tuple[Tensor, Tensor]] = []


@torch.no_grad()
def _all_gather(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    """Gathers ``shard`` [S] of every rank into [world_size * S]. ``unit`` is that of the graph's inputs, or, outside
    graphs, the buffer's number."""
    ranks = group_named(group)
    tell_apart(ranks, unit)
    full = shard.new_empty(shard.numel() * world_size)
    _start_all_gather(shard, full, ranks).wait()
    return full


@torch.no_grad()
def _pack(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    views: Sequence[int],
    unused: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    unit: int,
) -> Tensor:
    """Lays gradients out in a buffer of ``numel`` elements, each from its offset on; what lies between is undefined.

    Args:
        grads: gradients, in the order of their offsets.
        offsets: first element of each in the buffer.
        views: which of the unit's views each is the gradient of; the others have none. Only for passes.
        unused: places of parameters that have no gradient here, and may have one on another rank: first element and
            number of elements of each in turn. Zeroed.
        numel: elements of the buffer, [world_size * S].
        dtype: of the buffer.
        unit: ordinal of the unit among the graph's inputs. Only for passes.
    """
    packed = grads[0].new_empty(numel, dtype=dtype)
    if padding_is_read():  # between the places too
        packed.zero_()
    for grad, offset in zip(grads, offsets, strict=True):
        packed.narrow(0, offset, grad.numel()).view(grad.shape).copy_(grad)
    for offset, length in zip(unused[::2], unused[1::2], strict=True):
        packed.narrow(0, offset, length).zero_()
    return packed


@torch.no_grad()
def _reduce_scatter(full: Tensor, unit: int, group: str, replicas: str, reductions: Tensor | None) -> Tensor:
    """Averages ``full`` [world_size * S] over the ranks, and over replicas, and returns this rank's [S]."""
    ranks = group_named(group)
    tell_apart(ranks, unit)
    shard = full.new_empty(full.numel() // ranks.size())
    if held_back(full, shard, reductions):
        return shard
    scratch = full.new_empty(scratch_numel(shard.numel(), full.device, ranks))
    add_held(full, reductions)
    _start_reduce_scatter(full, shard, scratch, ranks, replicas_of(replicas)).wait()
    return shard


def _start_gather(shard: Tensor, full: Tensor, unit: int, group: str, with_next: bool = False) -> None:
    if together := _all_of(_gathers, [(shard, full)], with_next):
        pending = gather(together, group, _start_gathers)
        for _, each in together:
            launched(each, pending)


def _start_gathers(pairs: Pairs, group: str) -> Pending:
    ranks = group_named(group)
    return _start_all_gather(*pairs[0], ranks) if len(pairs) == 1 else start_all_gathers(pairs, ranks)


def _start_reduce(
    full: Tensor,
    shard: Tensor,
    scratch: Tensor,
    unit: int,
    group: str,
    replicas: str,
    reductions: Tensor | None = None,
    with_next: bool = False,
) -> None:
    ranks = group_named(group)
    held = held_back(full, shard, reductions)
    if held:
        launched(full, Nothing())
    else:
        add_held(full, reductions)
    if not (held or with_next or _reductions):
        launched(full, _start_reduce_scatter(full, shard, scratch, ranks, replicas_of(replicas)))
    elif together := _all_of(_reductions, [] if held else [(full, shard)], with_next):
        pending = start_reduce_scatters(together, ranks, replicas_of(replicas))
        for each, _ in together:
            launched(each, pending)


def end_failed_graph() -> None:
    """Ends what a graph that raised has begun: forgets launches that waited for one which never came, and waits for
    collectives that nobody waited for. Of those that fail the first is raised when none is left."""
    _gathers.clear()
    _reductions.clear()
    failures: list[RuntimeError] = []
    while _in_flight:
        try:
            _in_flight.popitem()[1].wait()
        except RuntimeError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def forget_launched() -> None:
    """Of a process group that is gone, of which nobody can wait for anything."""
    for each in (_gathers, _reductions, _in_flight):
        each.clear()


def _all_of(
    waiting: list[tuple[Tensor, Tensor]], more: Sequence[tuple[Tensor, Tensor]], with_next: bool
) -> list[tuple[Tensor, Tensor]]:
    """Those that are one collective, of which ``more`` are the last; none if others are to come."""
    waiting.extend(more)
    if with_next:
        return []
    together = list(waiting)
    waiting.clear()
    return together


def launched(full: Tensor, pending: Pending) -> None:
    """Keeps a collective on ``full`` until it is waited for."""
    if _in_flight.setdefault(full.data_ptr(), pending) is not pending:
        raise AssertionError("a collective was launched on a buffer that is in flight")


def in_flight_on(full: Tensor) -> Pending:
    """The collective that was launched on ``full``; who takes it waits for it."""
    return _in_flight.pop(full.data_ptr())


def _wait_gather(full: Tensor, unit: int) -> None:
    in_flight_on(full).wait()


def _wait_reduce(full: Tensor, shard: Tensor, scratch: Tensor, unit: int) -> None:
    in_flight_on(full).wait()


def replicas_of(group: str) -> dist.ProcessGroup | None:
    """The group of that name, None for no name."""
    return group_named(group) if group else None


def gives_float32_products(device: torch.device) -> bool:
    """Whether ``torch.mm`` and ``bmm`` of half precision give, with ``out_dtype=torch.float32``, what they sum up in:
    on NVIDIA's GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def _matmul_into(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """``out = a @ b``, or ``out += a @ b``: matrices, or batches of matrices of the same dtype; of ``out = a @ b``,
    ``out`` may be fp32 where the others are bf16 or fp16, if :func:`gives_float32_products`."""
    if accumulate:
        (out.addmm_ if a.dim() == 2 else out.baddbmm_)(a, b)
    elif out.dtype != a.dtype:
        (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out_dtype=out.dtype, out=out)
    else:
        (torch.mm if a.dim() == 2 else torch.bmm)(a, b, out=out)


def _embedding_into(out: Tensor, grad: Tensor, indices: Tensor, padding_idx: int) -> None:
    """The gradient of ``torch.nn.functional.embedding`` with respect to its weight ``out`` [rows, dim].

    As aten.embedding_dense_backward without scale_grad_by_freq, row by row in the order of ``indices``: on a CPU.
    """
    out.zero_()
    rows, grads = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if padding_idx >= 0:
        kept = rows != padding_idx
        rows, grads = rows[kept], grads[kept]
    out.index_add_(0, rows, grads)


def _sum_into(out: Tensor, value: Tensor, dims: list[int], keepdim: bool) -> None:
    """``out = value.sum(dims, keepdim, dtype=out.dtype)``"""
    torch.sum(value, dims, keepdim, dtype=out.dtype, out=out)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Defines an operator in the ``vescale`` namespace; without ``fake`` it returns nothing."""
    # flexible_layout: Inductor need not copy an operand to give it the strides it had while tracing.
    _LIBRARY.define(schema, tags=(torch.Tag.flexible_layout,))
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vescale::{name}", fake or _returns_nothing, lib=_LIBRARY)


def _returns_nothing(*args: object) -> None:
    pass


def _all_gather_fake(shard: Tensor, unit: int, world_size: int, group: str) -> Tensor:
    return shard.new_empty(shard.numel() * world_size)


def _all_gather_memory_fake(shard: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return shard.new_empty(numel, dtype=dtype)


def _pack_fake(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    views: Sequence[int],
    unused: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    unit: int,
) -> Tensor:
    return grads[0].new_empty(numel, dtype=dtype)


def _reduce_scatter_fake(full: Tensor, unit: int, group: str, replicas: str, reductions: Tensor | None) -> Tensor:
    return full.new_empty(full.numel() // group_named(group).size())


define("all_gather(Tensor shard, int unit, int world_size, str group) -> Tensor", _all_gather, _all_gather_fake)
define(
    "pack(Tensor[] grads, int[] offsets, int[] views, int[] unused, int numel, ScalarType dtype, int unit) -> Tensor",
    _pack,
    _pack_fake,
)
define(
    "reduce_scatter(Tensor full, int unit, str group, str replicas, Tensor? reductions) -> Tensor",
    _reduce_scatter,
    _reduce_scatter_fake,
)
define(
    "start_all_gather(Tensor shard, Tensor(a!) full, int unit, str group, bool with_next=False) -> ()", _start_gather
)
define(
    "all_gather_memory(Tensor shard, int numel, ScalarType dtype) -> Tensor", memory_of_gather, _all_gather_memory_fake
)
define("wait_all_gather(Tensor(a!) full, int unit) -> ()", _wait_gather)
define(
    "start_reduce_scatter(Tensor(a!) full, Tensor(b!) shard, Tensor(c!) scratch, int unit, str group, str replicas, "
    "Tensor? reductions=None, bool with_next=False) -> ()",
    _start_reduce,
)
define("wait_reduce_scatter(Tensor(a!) full, Tensor(b!) shard, Tensor(c!) scratch, int unit) -> ()", _wait_reduce)
define("matmul_into(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()", _matmul_into)
define("embedding_into(Tensor(a!) out, Tensor grad, Tensor indices, int padding_idx) -> ()", _embedding_into)
define("sum_into(Tensor(a!) out, Tensor value, int[] dims, bool keepdim) -> ()", _sum_into)

all_gather = torch.ops.vescale.all_gather.default
pack = torch.ops.vescale.pack.default
reduce_scatter = torch.ops.vescale.reduce_scatter.default
all_gather_memory = torch.ops.vescale.all_gather_memory.default
start_all_gather = torch.ops.vescale.start_all_gather.default
wait_all_gather = torch.ops.vescale.wait_all_gather.default
start_reduce_scatter = torch.ops.vescale.start_reduce_scatter.default
wait_reduce_scatter = torch.ops.vescale.wait_reduce_scatter.default
matmul_into = torch.ops.vescale.matmul_into.default
embedding_into = torch.ops.vescale.embedding_into.default
sum_into = torch.ops.vescale.sum_into.default
generate_sums_into(sum_into)
