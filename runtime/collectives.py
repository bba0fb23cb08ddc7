"""A unit's collectives, launched and waited for: an all-gather into a buffer, a reduce-scatter out of one.

Nothing stands between a collective and what is computed: a gather receives the other ranks' parts where parameters
are read, a reduction sends gradients from where they were written. This rank's own part of a gather has to come there
from its shard, which is a copy that no collective is without. How all this is done depends on the device:

- GPUs: the process group's own collectives, each kind on a stream of its own, ordered against compute by events: what
  is averaged over replicas goes over other links, maybe, while the next unit is reduced. Buffers are static or outlive
  the wait, so nothing is recorded on streams.
- CPUs with gloo: every rank sends each other rank its part directly, and copies its own (the copy-in that the census
  counts; elsewhere the collective does it). Gloo's own all-gather goes through a second buffer, and its reduce-scatter
  is an all-reduce of a copy, which sends twice as much.
- anything else: the process group's asynchronous collectives.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.groups import (
    all_gather_coalesced,
    all_gather_single,
    all_reduce_coalesced,
    debugged_groups_coalesce,
    reduce_scatter_coalesced,
    reduce_scatter_single,
)
from .messages import EXCHANGE, GATHER, REDUCTION, Message, peers_of, start_exchange

_COALESCING = ("nccl", "fake")  # backends
_backends: WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = WeakKeyDictionary()


class Pending(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Returns when its result may be read and its input written; on a GPU, by the current stream."""


class Nothing:
    """No collective, where another time there is one."""

    def wait(self) -> None:
        pass


def start_all_gather(shard: Tensor, full: Tensor, group: dist.ProcessGroup) -> Pending:
    """Gathers ``shard`` [S] of every rank into ``full`` [world_size * S].

    Args:
        shard: this rank's part, copied once into its place in ``full``, and cast there if that has another dtype.
        full: contiguous; neither it nor ``shard`` may be written until the wait has returned.
        group: the ranks, in the order of their parts.
    """
    own = _part(full, group.rank(), shard)
    if exchanges_directly(full.device, group):
        own.copy_(shard)
        return start_gather_in_place(full, group)
    if full.device.type == "cuda":
        return _on_stream("gather", full.device, lambda: all_gather_single(full, _in_dtype(shard, own), group=group))
    return all_gather_single(full, _in_dtype(shard, own), group=group, async_op=True)


def start_gather_in_place(full: Tensor, group: dist.ProcessGroup) -> Pending:
    """Brings to every rank what each has written to its part of ``full``, one of as many equal parts as ranks.

    Args:
        full: contiguous; may not be written until the wait has returned.
        group: the ranks, in the order of their parts.
    """
    parts = full.view(group.size(), -1)
    own = parts[group.rank()]
    if exchanges_directly(full.device, group):
        peers = peers_of(group)
        sent, received = [Message(own, rank) for rank in peers], [Message(parts[rank], rank) for rank in peers]
        return start_exchange(sent, received, group, GATHER)
    if full.device.type == "cuda":
        return _on_stream("gather", full.device, lambda: all_gather_single(full, own, group=group))
    return all_gather_single(full, own, group=group, async_op=True)


def start_all_gathers(gathers: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> Pending:
    """:func:`start_all_gather` of several pairs of ``shard`` and ``full``, of one dtype, as one collective. It
    may be waited for several times."""
    outputs = [full for _, full in gathers]

    def run(async_op: bool) -> Pending:
        return all_gather_coalesced(outputs, _in_dtypes(gathers, group.rank()), group, async_op=async_op)

    if outputs[0].device.type == "cuda":
        return _on_stream("gather", outputs[0].device, lambda: run(False))
    return _waited_once(run(True).wait)


def start_all_to_all(
    sent: Tensor, received: Tensor, group: dist.ProcessGroup, finish: Callable[[], object] = lambda: None
) -> Pending:
    """Sends each other rank its part of ``sent``; what they send comes to their parts of ``received``.

    This rank's own part may stay undefined in ``received``.

    Args:
        sent, received: contiguous, of as many equal parts as ranks, in their order. Neither may be written, nor
            ``received`` read, until the wait has returned.
        group: the ranks.
        finish: works on what came: on a GPU behind it, on its stream; on CPUs in the wait.
    """
    if exchanges_directly(sent.device, group):
        outgoing, incoming = sent.view(group.size(), -1), received.view(group.size(), -1)
        peers = peers_of(group)
        pending: Pending = start_exchange(
            [Message(outgoing[rank], rank) for rank in peers],
            [Message(incoming[rank], rank) for rank in peers],
            group,
            EXCHANGE,
        )
        return _Deferred(lambda: (pending.wait(), finish()))

    if sent.device.type == "cuda":

        def run() -> None:
            dist.all_to_all_single(received, sent, group=group)
            finish()

        return _on_stream("reduce", sent.device, run)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return _Deferred(lambda: (work.wait(), finish()))


def start_reduce_scatter(
    full: Tensor, shard: Tensor, scratch: Tensor, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None = None
) -> Pending:
    """Averages ``full`` [world_size * S] over the ranks, each rank taking its own part into ``shard`` [S].

    Args:
        full: contiguous; may be written again when the wait has returned.
        shard: takes the result, in the dtype of ``full``.
        scratch: :func:`scratch_numel` elements of the same dtype, in use until the wait has returned.
        group: the ranks that shard.
        replicas: the ranks that hold the same part of other such groups: the result is averaged over them too.
    """
    return over_replicas(_start_reduction(full, shard, scratch, group), [shard], replicas)


def _start_reduction(full: Tensor, shard: Tensor, scratch: Tensor, group: dist.ProcessGroup) -> Pending:
    if exchanges_directly(full.device, group):
        return _reduce_by_exchange(full, shard, scratch, group)

    def run(async_op: bool) -> Pending:
        return reduce_scatter_single(shard, full, op=_average(full.device, group), group=group, async_op=async_op)

    return _start_averages(run, [shard], group)


def start_reduce_scatters(
    reductions: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup, replicas: dist.ProcessGroup | None = None
) -> Pending:
    """:func:`start_reduce_scatter` of several pairs of ``full`` and ``shard``, of one dtype, as one collective, and as
    one of the replicas. It may be waited for several times."""
    inputs, outputs = (list(each) for each in zip(*reductions, strict=True))

    def run(async_op: bool) -> Pending:
        op = _average(inputs[0].device, group)
        return reduce_scatter_coalesced(outputs, inputs, op, group, async_op=async_op)

    return over_replicas(_start_averages(run, outputs, group), outputs, replicas)


def _start_averages(run: Callable[[bool], Pending], shards: Sequence[Tensor], group: dist.ProcessGroup) -> Pending:
    """What ``run`` reduces, asynchronously or on the current stream."""
    device = shards[0].device
    finish = functools.partial(run, False) if device.type == "cuda" else run(True).wait

    def reduce() -> None:
        finish()
        _divide(shards, group)

    return _on_stream("reduce", device, reduce) if device.type == "cuda" else _waited_once(reduce)


def over_replicas(pending: Pending, shards: Sequence[Tensor], replicas: dist.ProcessGroup | None) -> Pending:
    """What a reduction brings, averaged in place over the ranks that hold the same parts. Several shards, of one dtype,
    are by one collective. CPUs do it in the wait."""
    if replicas is None:
        return pending
    device, op = shards[0].device, _average(shards[0].device, replicas)

    def average() -> None:
        pending.wait()
        if len(shards) == 1:
            dist.all_reduce(shards[0], op=op, group=replicas)
        else:
            all_reduce_coalesced(list(shards), op, replicas)
        _divide(shards, replicas)

    return _on_stream("average", device, average) if device.type == "cuda" else _waited_once(average)


def start_asking(
    own: Sequence[bool], device: torch.device, groups: Sequence[dist.ProcessGroup]
) -> Callable[[], list[bool]]:
    """What it returns waits, and says which of the values ``own`` are True on any rank. On a GPU it is asked behind the
    reductions that are in flight, which would otherwise hold up computation: NCCL does one thing after another."""
    asked: list[Tensor] = []

    def run() -> None:
        mask = torch.tensor(own, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        mask = mask.to(device, non_blocking=True)  # from pageable memory the host would wait for all the GPU has to do
        for group in groups:
            dist.all_reduce(mask, dist.ReduceOp.MAX, group)
        asked.append(mask)

    def answer() -> list[bool]:
        pending.wait()
        return [bool(value) for value in asked[0].tolist()]

    pending: Pending = Nothing()
    if device.type == "cuda":
        pending = _on_stream("reduce", device, run)
    else:
        run()
    return answer


def checked_for_nan() -> bool:
    """Whether somebody looks for NaN in all of a slot, padding too: NCCL in whatever it sends
    (``TORCH_NCCL_NAN_CHECK``), or Inductor in whatever a graph is given (``TORCHINDUCTOR_NAN_ASSERTS``)."""
    by_nccl = os.environ.get("TORCH_NCCL_NAN_CHECK", "").lower() in ("1", "y", "yes", "t", "true")
    return by_nccl or torch._inductor.config.nan_asserts


def padding_is_read() -> bool:
    """Whether somebody looks for NaN in what pads gradients: who :func:`checked_for_nan` speaks of, or autograd."""
    return torch.is_anomaly_enabled() or checked_for_nan()


def coalesces(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether collectives of several units can be one, whose latency is paid once. Messages gain nothing by it."""
    if exchanges_directly(device, group) or not debugged_groups_coalesce():
        return False
    return _backend(device, group) in _COALESCING


def scratch_numel(shard_numel: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """Elements that :func:`start_reduce_scatter` needs besides its input and output."""
    return shard_numel * (group.size() - 1) if exchanges_directly(device, group) else 0


def exchanges_directly(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether ranks send each other their parts, instead of a collective of the backend."""
    return device.type == "cpu" and _backend(device, group) == "gloo"


def _backend(device: torch.device, group: dist.ProcessGroup) -> str:
    """The name of what the group uses on a device; "" if that has none."""
    if group not in _backends:
        _backends[group] = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return _backends[group].get(device.type, "")


def _reduce_by_exchange(full: Tensor, shard: Tensor, scratch: Tensor, group: dist.ProcessGroup) -> Pending:
    peers = peers_of(group)
    received = scratch.view(len(peers), shard.numel())
    exchange = start_exchange(
        [Message(_part(full, rank, shard), rank) for rank in peers],
        [Message(part, rank) for part, rank in zip(received, peers, strict=True)],
        group,
        REDUCTION,
    )

    def finish() -> None:
        exchange.wait()
        # In the order of ranks, so that the sum does not depend on who computes it.
        parts = {group.rank(): _part(full, group.rank(), shard), **dict(zip(peers, received, strict=True))}
        first, *others = (parts[rank] for rank in sorted(parts))
        if others:
            torch.add(first, others[0], out=shard)
        else:
            shard.copy_(first)
        for part in others[1:]:
            shard.add_(part)
        shard.div_(group.size())

    return _Deferred(finish)


def _average(device: torch.device, group: dist.ProcessGroup) -> dist.ReduceOp.RedOpType:
    """Gloo can't average: it sums, and :func:`_divide` does the rest. One rank's sum is its average, which NCCL before
    2.29.7 leaves incomplete (https://github.com/NVIDIA/nccl/issues/1950)."""
    return dist.ReduceOp.SUM if group.size() == 1 or _backend(device, group) == "gloo" else dist.ReduceOp.AVG


def _divide(shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if group.size() > 1 and _average(shards[0].device, group) == dist.ReduceOp.SUM:
        for shard in shards:
            shard.div_(group.size())


def _part(full: Tensor, rank: int, shard: Tensor) -> Tensor:
    return full.narrow(0, rank * shard.numel(), shard.numel())


def _in_dtype(shard: Tensor, own: Tensor) -> Tensor:
    """The shard, if it has the buffer's dtype; else its place in the buffer, with the shard cast into it."""
    return shard if shard.dtype == own.dtype else own.copy_(shard)


def _in_dtypes(gathers: Sequence[tuple[Tensor, Tensor]], rank: int) -> list[Tensor]:
    """:func:`_in_dtype` of several shards, all of which are cast by one kernel."""
    pairs = [(shard, _part(full, rank, shard)) for shard, full in gathers]
    if cast := [(own, shard) for shard, own in pairs if shard.dtype != own.dtype]:
        torch._foreach_copy_([own for own, _ in cast], [shard for _, shard in cast])
    return [shard if shard.dtype == own.dtype else own for shard, own in pairs]


@dataclass(frozen=True)
class _Deferred:
    """A collective in flight whose end is a function; it keeps what it uses, which a graph that raises would free."""

    wait: Callable[[], object]
    uses: object = None


def _waited_once(finish: Callable[[], object]) -> Pending:
    """Of work that copies its results out whenever it is waited for, as gloo's does: over what has become of them."""
    return _Deferred(functools.cache(finish))


def _on_stream(name: str, device: torch.device, run: Callable[[], object]) -> Pending:
    """Runs ``run`` on a stream of its own, after what the device's current stream holds; the wait orders that stream
    after it. The device need not be the current one.

    By ``torch.Stream`` and ``torch.accelerator``: those of ``torch.cuda`` look for GPUs each time, and take four times
    as long, and so does a device where its index will do.
    """
    stream = _stream(name, device)
    stream.wait_stream(torch.accelerator.current_stream(device.index))
    with stream:
        run()
    done = stream.record_event()
    return _Deferred(lambda: torch.accelerator.current_stream(device.index).wait_event(done), uses=run)


_streams: dict[tuple[str, torch.device], torch.Stream] = {}


def _stream(name: str, device: torch.device) -> torch.Stream:
    """High priority, so that communication is not queued behind compute."""
    if (name, device) not in _streams:
        _streams[name, device] = torch.Stream(device, priority=-1)
    return _streams[name, device]


def follow_all(device: torch.device) -> None:
    """Orders the current stream of ``device`` after all communication there: what raised may have launched some that
    nobody knows of, and gives its memory back."""
    for (_, of), stream in _streams.items():
        if of == device:
            torch.accelerator.current_stream(device.index).wait_stream(stream)
