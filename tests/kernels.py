"""Counts what runs on the local tensors of sharded ones, and what is allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from scripts import BENCH
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_compile as vc

sys.path.append(str(BENCH))

from allocations import highest_rise


class Kernels(TorchDispatchMode):
    """Records each operator that ran on local tensors, with the number of tensors it ran over. Views don't count."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if vc.RaggedDTensor in types:
            return NotImplemented  # unwrapped first
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self.ran.append((func._opname, len(args[0]) if args and isinstance(args[0], list | tuple) else 1))
        return func(*args, **(kwargs or {}))

    def over(self, *names: str) -> int:
        """Tensors that operators of these names ran over: as many kernels, where lists are not fused."""
        return sum(tensors for name, tensors in self.ran if name in names)


def allocated_by(step: Callable[[], object]) -> int:
    """How far a step's allocations rise above where they stand at its start, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    return highest_rise(trace.profiler.kineto_results.experimental_event_tree(), "cpu")
