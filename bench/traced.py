"""Ranks that say when the main thread computed in a step."""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from forecaster import Forecaster
from torch.profiler import ProfilerActivity, profile, record_function
from worker import Trainer

from vescale_compile.runtime import arrivals, crossing

_STEP = "one training step"
_COMMUNICATION = (
    *("c10d::", "_c10d_functional", "FSDP::"),
    *(f"vescale::{what}_" for what in ("start", "wait", "carry", "take", "leave")),
)
_COMPUTATION = ("aten::", "vescale::matmul_into")  # beside generated kernels


Spans = list[tuple[float, float]]
"""Starts and stops, seconds from the start of the step"""


class Trace(NamedTuple):
    """One step on one rank: its start and stop on the machine's monotonic clock, and when operators ran."""

    start: float
    stop: float
    computation: Spans


class TracedTrainer(Trainer):
    """A trainer whose generated kernels the profiler sees."""

    def join(self) -> None:
        torch._inductor.config.cpp.enable_kernel_profile = True
        super().join()

    def trace(self) -> Trace:
        """One more training step, profiled."""
        # A whole step ends all that it launches: nothing need be waited for earlier because it is profiled.
        with (
            mock.patch.object(arrivals, "profiled_to_the_end", return_value=False),
            mock.patch.object(crossing, "profiled_to_the_end", return_value=False),
            profile(activities=[ProfilerActivity.CPU]) as profiler,
        ):
            dist.barrier()  # profilers take milliseconds to start, not alike on all ranks
            start = time.monotonic()
            with record_function(_STEP):
                self._train()
            stop = time.monotonic()
        events: Any = profiler.events()
        step = next(event for event in events if event.name == _STEP)
        zero, end = step.time_range.start, step.time_range.end
        spans = [
            ((event.time_range.start - zero) / 1e6, (event.time_range.end - zero) / 1e6)
            for event in events
            if (event.name.startswith(_COMPUTATION) or "cpp_fused" in event.name)
            and event.thread == step.thread
            and not _only_dispatches(event)
            and zero <= event.time_range.start <= end
            and not _communicates(event)
        ]
        return Trace(start, stop, merged(spans))


class TracedForecaster(TracedTrainer, Forecaster):
    """The same of our system, which also predicts the step."""


def merged(spans: Spans) -> Spans:
    """The same times, none of them twice: spans that touch, or lie in others, as an operator does in the one that calls
    it, are one."""
    found: Spans = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _only_dispatches(event: Any) -> bool:
    """Whether an event is an operator on sharded tensors, which may wait for some of them between the same operator's
    calls on local ones."""
    return any(child.name == event.name for child in event.cpu_children)


def _communicates(event: Any) -> bool:
    """Whether an event, or one that it is inside of, belongs to a collective's launch or wait."""
    while event is not None:
        if event.name.startswith(_COMMUNICATION):
            return True
        event = event.cpu_parent
    return False
