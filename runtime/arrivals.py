"""Reduced gradients on their way: whoever first reads one waits for it, as with PyTorch's AsyncCollectiveTensor.

A backward leaves its last reductions in flight. What they reduce into is known by its memory, until a graph starts
that wants the slots which they use: the next one, or, of layers compiled one by one, the next but one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..torch_internals.autograd import outside_tracing, profiled_to_the_end


@dataclass(eq=False)
class Arrival:
    """The end of a reduction that was left in flight.

    Attributes:
        number: in the order in which they were left.
        held: where the gradients will be, then what the reduction reads and writes besides; not freed meanwhile.
        device: where that is.
        uses: where what is besides is, from the first byte to behind the last.
    """

    number: int
    held: tuple[Tensor, ...]
    _finish: Callable[[], object] | None
    _left_on: torch.Stream | None  # where their memory goes when it is freed
    _done: torch.Event | None = field(default=None, init=False)
    _waited: torch.Stream | None = field(default=None, init=False)  # the last stream that comes after it
    device: torch.device = field(init=False)
    uses: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.held[0].device
        self.uses = tuple(_span(each) for each in self.held[1:])

    @property
    def over(self) -> bool:
        """Whether it was waited for."""
        return self._finish is None

    @property
    def may_be_freed(self) -> bool:
        """Whether what a GPU still writes comes before all that memory freed now may be used for. The current stream
        has waited for it."""
        if self._done is None or torch.accelerator.current_stream(self.device) == self._left_on:
            return True
        return self._done.query()

    def wait(self) -> None:
        """Returns when the gradients may be read; on a GPU, by the current stream.

        Raises:
            RuntimeError: of the process group, if the reduction failed or took longer than its timeout. Of NCCL's,
                PyTorch's watchdog ends the process instead.
        """
        if self._finish is None:
            if self._done is not None and (stream := torch.accelerator.current_stream(self.device)) != self._waited:
                stream.wait_event(self._done)
                self._waited = stream
            return
        with outside_tracing(), torch.no_grad():
            self._finish()
        self._finish = None
        if self.device.type == "cuda":
            self._waited = torch.accelerator.current_stream(self.device)
            self._done = self._waited.record_event()
            if self._waited == self._left_on:  # so slots go with their last graph, though no other comes
                self.held = ()
        else:
            _arrivals.pop(self.held[0].data_ptr(), None)
            self.held = ()


_numbers = itertools.count()
_arrivals: dict[int, Arrival] = {}
"""By the addresses of their gradients; on a GPU also when these are freed, until a graph starts."""

_kept: list[Arrival] = []
"""To be waited for by the next graph: on another stream than the one that they were left on, which PyTorch's allocator
knows nothing of, or of gradients that were freed, whose memory others were reduced into since."""


def leave(result: Tensor, uses: tuple[Tensor, ...], finish: Callable[[], object]) -> None:
    """Has ``finish`` called when ``result`` is first read, at the latest by :func:`settle`. On CPUs a profiled
    backward, which may be all that is profiled, calls it at once.

    Args:
        result: takes the reduced gradients.
        uses: what else must stay until then.
        finish: waits, and computes what is left to compute.
    """
    if torch.is_anomaly_enabled() or profiled_to_the_end(result.device):
        finish()  # autograd itself reads all gradients in anomaly mode
    else:
        stream = torch.accelerator.current_stream(result.device) if result.device.type == "cuda" else None
        if (former := arrival_of(result)) is not None:
            _kept.append(former)
        _arrivals[result.data_ptr()] = Arrival(next(_numbers), (result, *uses), finish, stream)


def arrival_of(result: Tensor) -> Arrival | None:
    """What must be waited for before ``result`` is read; None if nothing was left in flight there."""
    return _arrivals.get(result.data_ptr())


def next_number() -> int:
    """Less than those of the reductions that are left from now on, and more than those that were left before."""
    return next(_numbers)


def wait_for_uses(memory: Sequence[Tensor]) -> None:
    """Waits for what was left in flight and uses some of the ``memory``, which is about to be written."""
    spans = [_span(written) for written in memory]
    for arrival in list(_arrivals.values()):
        if any(_overlap(used, written) for used in arrival.uses for written in spans):
            arrival.wait()


def _span(memory: Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.data_ptr() + memory.nbytes


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def forget() -> None:
    """Of a process group that is gone, from which nothing arrives any more."""
    _arrivals.clear()
    _kept.clear()


def settle(before: float = math.inf) -> None:
    """Waits for everything that was left in flight, or for what has numbers ``before`` that one. Of what fails the
    first is raised, once; whoever reads it gets its own failure."""
    left = [_arrivals.pop(address) for address, each in list(_arrivals.items()) if each.number < before]
    waiting = [*_kept, *left]
    _kept.clear()
    failures: list[RuntimeError] = []
    for arrival in waiting:
        try:
            arrival.wait()
        except RuntimeError as failure:
            failures.append(failure)
            continue
        if arrival.may_be_freed:
            arrival.held = ()
        else:
            _kept.append(arrival)
    if failures:
        raise failures[0]
