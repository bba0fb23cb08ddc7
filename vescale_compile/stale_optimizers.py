"""Refuses optimizers that were built before ``fully_shard``: they would step parameters that no module reads."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


@functools.cache
def watch() -> None:
    """Looks at every optimizer's parameters before each step, from now on."""
    register_optimizer_step_pre_hook(_check)


@torch.compiler.disable
def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = [param for param in params if hasattr(param, "_vescale_sharded")]
    if stale:
        raise RuntimeError(
            f"[rank {dist.get_rank()}] {type(optimizer).__name__}: {len(stale)} of its {len(params)} parameters were "
            "replaced by sharded ones, so its steps would change nothing. Build the optimizer after fully_shard."
        )
