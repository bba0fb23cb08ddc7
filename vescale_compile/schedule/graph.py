"""The task graph: computation in a fixed order, and the transfers that are to run beside it.

Times are in seconds, memory in bytes. A *position* is an index into the computation's order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Compute:
    """One piece of the computation.

    Attributes:
        name: for reports and errors.
        duration: seconds, with the device to itself.
        live_bytes: memory live while it runs, but for the buffers of transfers: activations, shards, states.
        issue: seconds that the host takes to launch its kernels, one by one. It may be ahead of a device; 0 where it is
            the device.
    """

    name: str
    duration: float
    live_bytes: int = 0
    issue: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One unit's communication. Its duration is ``latency + wire_time``.

    An all-gather has readers and no writers: it may start at any time, and its unsharded buffer
    (``output_bytes``) is held from its launch until the last reader has run. A reduce-scatter has writers and, in
    a graph that ends with the gradients, no readers: its gradient buffer (``input_bytes``) is held from the first
    writer on, until it is waited for, which is when the program knows that it is done. Transfers with both exist
    too. What has no readers is needed at the end, and its output is held to the end. What a transfer needs besides,
    while it is in flight (``scratch_bytes``), is held from its launch until its wait.

    Attributes:
        name: unique in the graph.
        latency: seconds that a collective takes whatever it carries; merged transfers pay it once.
        wire_time: seconds in proportion to the bytes.
        writers: positions that write the input; the transfer is launched after the last of them.
        readers: positions that read the output.
        input_bytes: of the buffer sent, where the schedule decides how long it lives.
        output_bytes: of the buffer received.
        scratch_bytes: of memory that only the collective uses.
        lane: transfers of one lane run one after another in the order of their launches (a stream). Lanes that are
            busy at the same time get equal shares of the wire.
        load: share of the compute device that the transfer takes while it has the wire to itself, in [0, 1).
        stretch: how many times longer it takes while the device computes beside it, at least 1.
        wakeup: seconds that it takes longer if the wire is idle when it is launched; of merged transfers, the most.
        launch: seconds for which its launch keeps the device from computing; merged transfers pay each.
        issue: seconds that the host takes for what it launches of it alone; merged transfers pay each.
        call: seconds that the host takes for the call of a collective; merged transfers pay it once, the longest.
        then_latency, then_wire_time: seconds that it takes after the wire, on other links, which carry what comes to
            them one after another: the average over replicas. Merged transfers pay the latency once.
        repeats: index of the earlier transfer whose output this one brings once more (the gather for the
            backward): a schedule may keep that output instead.
        merge: transfers of equal ``merge`` may share one collective; None for those that may not.
        block: what this gathers or reduces a part of; "" for what is no part.
    """

    name: str
    latency: float
    wire_time: float
    writers: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()
    input_bytes: int = 0
    output_bytes: int = 0
    scratch_bytes: int = 0
    lane: str = "communication"
    load: float = 0.0
    stretch: float = 1.0
    wakeup: float = 0.0
    launch: float = 0.0
    issue: float = 0.0
    call: float = 0.0
    then_latency: float = 0.0
    then_wire_time: float = 0.0
    repeats: int | None = None
    merge: str | None = None
    block: str = ""

    @property
    def duration(self) -> float:
        """Seconds, with the wire to itself."""
        return self.latency + self.wire_time

    @property
    def then(self) -> float:
        """Seconds after the wire, with the other links to itself."""
        return self.then_latency + self.then_wire_time

    @property
    def ready(self) -> int:
        """The first position before which it can be launched."""
        return max(self.writers, default=-1) + 1

    @property
    def deadline(self) -> int | None:
        """The position before which it must be done; None: at the end."""
        return min(self.readers, default=None)


def seconds_together(transfers: Sequence[Transfer]) -> float:
    """What transfers take as one collective, with the wire to itself."""
    return max(transfer.latency for transfer in transfers) + sum(transfer.wire_time for transfer in transfers)


def seconds_then(transfers: Sequence[Transfer]) -> float:
    """What transfers take as one collective after the wire, on other links."""
    return max(each.then_latency for each in transfers) + sum(each.then_wire_time for each in transfers)


def issue_together(transfers: Sequence[Transfer]) -> float:
    """What the host takes to launch transfers as one collective."""
    return max(transfer.call for transfer in transfers) + sum(transfer.issue for transfer in transfers)


Bytes = tuple[int, int]
"""Of the two memories of a graph: what is received lies in the first, with everything else, and what is sent in the
second, with the scratch. Where nothing lies apart, all is in the first."""


@dataclass(frozen=True)
class TaskGraph:
    """Computation in its order, and transfers in any order. Checks itself when made.

    Attributes:
        compute: in its order.
        transfers: in any order.
        apart: whether inputs and scratch lie in a memory of their own. Each memory is there all the time, as large as
            it has to be once: what a schedule takes is the most that it holds of either, at whatever moment.
        before, after: seconds that the host takes before it launches anything, and when it has launched everything.

    Raises:
        ValueError: a task that makes no sense; the message names it.
    """

    compute: tuple[Compute, ...]
    transfers: tuple[Transfer, ...]
    apart: bool = False
    before: float = 0.0
    after: float = 0.0

    def __post_init__(self) -> None:
        if not self.compute:
            raise ValueError("a task graph needs at least one compute task")
        for compute in self.compute:
            numbers = {"duration": compute.duration, "live_bytes": compute.live_bytes, "issue": compute.issue}
            for what, value in numbers.items():
                if not 0 <= value < math.inf:
                    raise ValueError(
                        f"compute task {compute.name!r}: {what} is {value}; it must be finite and not negative"
                    )
        for what in ("before", "after"):
            if not 0 <= getattr(self, what) < math.inf:
                raise ValueError(
                    f"a task graph's {what} is {getattr(self, what)} s; it must be finite and not negative"
                )
        names: set[str] = set()
        for index, transfer in enumerate(self.transfers):
            if transfer.name in names:
                raise ValueError(f"two transfers are named {transfer.name!r}; names must be unique")
            names.add(transfer.name)
            if problem := self._problem(transfer) or self._repeat_problem(index, transfer):
                raise ValueError(f"transfer {transfer.name!r}: {problem}")

    @cached_property
    def elapsed(self) -> tuple[float, ...]:
        """Seconds of compute before each position, and at last before the end."""
        return tuple(itertools.accumulate((compute.duration for compute in self.compute), initial=0.0))

    @cached_property
    def issued(self) -> tuple[float, ...]:
        """Seconds that the host takes for the compute tasks before each position, and at last for all."""
        return tuple(itertools.accumulate((compute.issue for compute in self.compute), initial=self.before))

    def fed(self) -> TaskGraph:
        """The same where the host has launched everything before."""
        compute = tuple(replace(task, issue=0.0) for task in self.compute)
        transfers = tuple(replace(transfer, issue=0.0, call=0.0) for transfer in self.transfers)
        return replace(self, compute=compute, transfers=transfers, before=0.0, after=0.0)

    def split(self, received: int, sent: int) -> Bytes:
        """Bytes by the memory that they lie in."""
        return (received, sent) if self.apart else (received + sent, 0)

    def live_before(self, position: int) -> int:
        """Bytes live between two compute tasks: no more than in either of them."""
        live = [self.compute[p].live_bytes for p in (position - 1, position) if 0 <= p < len(self.compute)]
        return min(live)

    def gap(self, transfer: Transfer) -> range:
        """Positions through which the output that ``transfer`` repeats is held for nothing but it, if it is kept."""
        assert transfer.repeats is not None
        return range(max(self.transfers[transfer.repeats].readers) + 1, min(transfer.readers))

    def _problem(self, transfer: Transfer) -> str | None:
        positions = transfer.writers + transfer.readers
        if not (0 <= transfer.latency < math.inf and 0 <= transfer.wire_time < math.inf):
            return f"latency {transfer.latency} s and wire_time {transfer.wire_time} s must be finite, not negative"
        if not positions:
            return "nothing writes its input and nothing reads its output; leave it out"
        if min(positions) < 0 or max(positions) >= len(self.compute):
            return f"writers and readers {positions} must be positions from 0 to {len(self.compute) - 1}"
        if transfer.deadline is not None and transfer.deadline < transfer.ready:
            return f"position {transfer.deadline} reads its output before position {transfer.ready - 1} has written"
        for what in ("input_bytes", "output_bytes", "scratch_bytes"):
            if getattr(transfer, what) < 0:
                return f"{what} {getattr(transfer, what)} must not be negative"
        if not 0 <= transfer.load < 1:
            return f"load {transfer.load} must be in [0, 1)"
        if not 1 <= transfer.stretch < math.inf:
            return f"stretch {transfer.stretch} must be at least 1"
        for what in ("wakeup", "launch", "issue", "call", "then_latency", "then_wire_time"):
            if not 0 <= getattr(transfer, what) < math.inf:
                return f"{what} {getattr(transfer, what)} s must be finite, not negative"
        return None

    def _repeat_problem(self, index: int, transfer: Transfer) -> str | None:
        if transfer.repeats is None:
            return None
        if not 0 <= transfer.repeats < index:
            return f"it repeats transfer {transfer.repeats}, which is not one before it"
        first = self.transfers[transfer.repeats]
        if transfer.writers or not transfer.readers or not first.readers:
            return "a transfer that repeats another has readers, as the other has, and no writers"
        if transfer.output_bytes != first.output_bytes:
            return (
                f"it repeats {first.name!r}, whose output has {first.output_bytes} bytes, not {transfer.output_bytes}"
            )
        if max(first.readers) >= min(transfer.readers):
            return f"it is read before {first.name!r}, which it repeats, has been read"
        return None
