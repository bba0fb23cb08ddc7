"""The task graph: computation in a fixed order, and the transfers that are to run beside it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

from vescale_compile.schedule.tasks import Compute, Together, Transfer

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

    @cached_property
    def between(self) -> tuple[int, ...]:
        """Bytes live before each position, and at the end: between two compute tasks, no more than in either."""
        live = [compute.live_bytes for compute in self.compute]
        return (live[0], *map(min, itertools.pairwise(live)), live[-1])

    def together(self, transfers: tuple[int, ...]) -> Together:
        """These transfers, by their indices, as one collective."""
        found = self._together.get(transfers)
        if found is None:
            found = self._together[transfers] = Together.of([self.transfers[index] for index in transfers])
        return found

    @cached_property
    def _together(self) -> dict[tuple[int, ...], Together]:
        return {}

    def fed(self) -> TaskGraph:
        """The same where the host has launched everything before."""
        compute = tuple(replace(task, issue=0.0) for task in self.compute)
        transfers = tuple(replace(transfer, issue=0.0, call=0.0) for transfer in self.transfers)
        return replace(self, compute=compute, transfers=transfers, before=0.0, after=0.0)

    def split(self, received: int, sent: int) -> Bytes:
        """Bytes by the memory that they lie in."""
        return (received, sent) if self.apart else (received + sent, 0)

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
