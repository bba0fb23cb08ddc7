"""Profiles one training step of one rank: its collectives, its copies, its kernels."""

from __future__ import annotations

import gc
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import allocations
import copies
import inductor_kernels
import torch
import torch.distributed as dist
import traffic
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch._subclasses.fake_tensor import is_fake
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils.dlpack import from_dlpack

from vescale_compile.runtime import pool


class Recording(NamedTuple):
    """What PyTorch recorded of one step."""

    trace: Sequence[dict[str, Any]]
    """nodes of the execution trace: it has every collective's tensors, lists of lists too"""
    tree: Sequence[Any]
    """roots of the profile's event tree: it tells storages apart that have had the same address"""
    kernels: Mapping[str, inductor_kernels.Kernel]
    """what Inductor's kernels do, by the names of their events"""
    profiler: profile


@dataclass
class StepProfile:
    """What one step did, as one rank saw it."""

    collectives: dict[str, traffic.Traffic]
    """by kind"""
    copies: copies.Copies
    tensors_before: int
    """bytes of all tensors on the device when it began"""
    tensor_peak: int
    """the same at its fullest moment"""
    device_kernels: int | None
    """launched on the GPU, copies and collectives among them; None on a CPU"""


def profiled(step: Callable[[], object], world_size: int, device: torch.device) -> StepProfile:
    """Calls ``step``, which must have run before, and says what it did on this rank."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else _tensor_bytes()
    return summarized(recorded(step, device), before, world_size, device)


def recorded(step: Callable[[], object], device: torch.device) -> Recording:
    """Calls ``step``, which must have run before, and records it."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        observer = ExecutionTraceObserver().register_callback(str(path))
        try:
            with (
                _slots_told_apart(),
                inductor_kernels.recorded() as kernels,
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
    return Recording(nodes, results.kineto_results.experimental_event_tree(), kernels, profiler)


@contextmanager
def _slots_told_apart() -> Iterator[None]:
    """Profiles know memory by its storage, which all slots have in common: here each has one of its own, in the same
    place."""
    take = pool._Memory.take

    def take_apart(memory: pool._Memory, spec: pool.SlotSpec) -> Tensor:
        return from_dlpack(take(memory, spec).view(torch.uint8)).view(spec.dtype)

    with mock.patch.object(pool._Memory, "take", take_apart):
        yield


def summarized(recording: Recording, before: int, world_size: int, device: torch.device) -> StepProfile:
    """What a recorded step did; there were ``before`` bytes of tensors when it began."""
    events = recording.profiler.events() or ()
    return StepProfile(
        traffic.count(recording.trace, world_size, dist.get_rank()),
        copies.count(recording.tree, recording.kernels),
        before,
        before + allocations.highest_rise(recording.tree, device.type),
        sum(event.device_type == DeviceType.CUDA for event in events) if device.type == "cuda" else None,
    )


def _tensor_bytes() -> int:
    """Of the CPU's tensors that exist now, each storage once."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # some modules warn when their attributes are looked at
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and not is_fake(each)]
    storages = [
        each.untyped_storage() for each in tensors if each.device.type == "cpu" and each.layout is torch.strided
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
