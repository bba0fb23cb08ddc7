"""Profiles one training step of one rank: its collectives, its copies, its kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import copies
import inductor_kernels
import torch
import torch.distributed as dist
import traffic
from torch._C._autograd import DeviceType
from torch._C._profiler import _EventType
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile


@dataclass
class StepProfile:
    """What one step did, as one rank saw it."""

    collectives: dict[str, traffic.Traffic]
    """by kind"""
    copies: copies.Copies
    device_kernels: int | None
    """launched on the GPU, copies and collectives among them; None on a CPU"""
    extra_bytes: int
    """of tensors that were allocated in the step: the most at any one time"""


def profiled(step: Callable[[], object], world_size: int, device: torch.device) -> StepProfile:
    """Calls ``step``, which must have run before, and says what it did on this rank."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        # The execution trace has every collective's tensors, lists of lists too; the profile tells storages
        # apart that have had the same address.
        observer = ExecutionTraceObserver().register_callback(str(path))
        try:
            with (
                inductor_kernels.recorded() as moves,
                profile(
                    activities=activities, record_shapes=True, profile_memory=True, execution_trace_observer=observer
                ) as profiler,
            ):
                step()
                if on_gpu:
                    torch.cuda.synchronize(device)
        finally:
            observer.unregister_callback()
        nodes = json.loads(path.read_text())["nodes"]
    results: Any = profiler.profiler
    events = profiler.events() or ()
    tree = results.kineto_results.experimental_event_tree()
    return StepProfile(
        traffic.count(nodes, world_size, dist.get_rank()),
        copies.count(tree, moves),
        sum(event.device_type == DeviceType.CUDA for event in events) if on_gpu else None,
        extra_memory(tree, device.type),
    )


def extra_memory(events: Iterable[Any], device_type: str) -> int:
    """The most bytes that were allocated at one time on devices of a type, beside what was there before.

    Args:
        events: roots of a profile's event tree, recorded with memory.
    """
    held: dict[int, int] = {}
    most = now = 0
    for _, address, size in sorted(_allocations(events, device_type)):
        if size > 0:
            held[address] = size
            now += size
        else:  # of memory that was there before, what is freed is not known to be as much
            now -= held.pop(address, 0)
        most = max(most, now)
    return most


def _allocations(events: Iterable[Any], device_type: str) -> Iterator[tuple[int, int, int]]:
    """Time, address and size, negative where memory is freed, of all below some events."""
    for event in events:
        tag, fields = event.typed
        if tag == _EventType.Allocation and fields.device.type == device_type:
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from _allocations(event.children, device_type)
