"""What a task graph is made of.

Times are in seconds, memory in bytes. A *position* is an index into the computation's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Together:
    """One or more transfers as one collective.

    Attributes:
        lane: the first one's.
        ready: the first position before which it can be launched.
        duration: seconds, with the wire to itself.
        then: seconds after the wire, with the other links to itself.
        load, stretch, wakeup: the most of any.
        launch: seconds for which its launch keeps the device from computing.
        issue: seconds that the host takes for it.
        input_bytes, output_bytes, scratch_bytes: of all.
    """

    lane: str
    ready: int
    duration: float
    then: float
    load: float
    stretch: float
    wakeup: float
    launch: float
    issue: float
    input_bytes: int
    output_bytes: int
    scratch_bytes: int

    @classmethod
    def of(cls, parts: Sequence[Transfer]) -> Together:
        return cls(
            lane=parts[0].lane,
            ready=max(part.ready for part in parts),
            duration=max(part.latency for part in parts) + sum(part.wire_time for part in parts),
            then=max(part.then_latency for part in parts) + sum(part.then_wire_time for part in parts),
            load=max(part.load for part in parts),
            stretch=max(part.stretch for part in parts),
            wakeup=max(part.wakeup for part in parts),
            launch=sum(part.launch for part in parts),
            issue=max(part.call for part in parts) + sum(part.issue for part in parts),
            input_bytes=sum(part.input_bytes for part in parts),
            output_bytes=sum(part.output_bytes for part in parts),
            scratch_bytes=sum(part.scratch_bytes for part in parts),
        )
