"""Profiles one training step of one rank: its collectives, its copies, its kernels."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import copies
import inductor_kernels
import torch
import traffic
from torch._C._autograd import DeviceType
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile


@dataclass
class StepProfile:
    """What one step did, as one rank saw it."""

    collectives: dict[str, traffic.Traffic]
    """by kind"""
    copies: copies.Copies
    device_kernels: int | None
    """launched on the GPU, copies and collectives among them; None on a CPU"""


def profiled(step: Callable[[], object], world_size: int, device: torch.device) -> StepProfile:
    """Calls ``step``, which must have run before, and says what it did."""
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
    return StepProfile(
        traffic.count(nodes, world_size),
        copies.count(results.kineto_results.experimental_event_tree(), moves),
        sum(event.device_type == DeviceType.CUDA for event in events) if on_gpu else None,
    )
