"""Refuses steps that would change nothing: of optimizers that were built before ``fully_shard``, whose parameters no
module reads, and of those whose gradients ``no_sync`` holds back, all of them. Steps by a part of the gradients, of
which ``no_sync`` holds back the last ones. And those of torchao's optimizers, which make states by
``DTensor.from_local`` and would fail in Dynamo's words: it knows no RaggedShard."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .runtime.boundary import binding_of


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
    if type(optimizer).__module__.startswith("torchao.") and any(binding_of(param) is not None for param in params):
        raise RuntimeError(
            f"[rank {dist.get_rank()}] {type(optimizer).__name__} of torchao makes states that know no RaggedShard, of "
            "parameters that are sharded by it. Use vescale_compile.optim.AdamW8bit"
        )
    if kwargs.get("closure") is not None or any(map(callable, args[1:])):
        return  # which computes gradients yet
    bound = [(param, binding) for param in params if (binding := binding_of(param)) is not None]
    held_back = [(param, binding) for param, binding in bound if binding.buffer.reductions.unreduced is not None]
    if not held_back:
        return
    where = f"[rank {dist.get_rank()}] {type(optimizer).__name__}: "
    forget = "or forget what has accumulated: zero_grad() of the sharded module"
    if all(param.grad is None for param in params):
        raise RuntimeError(
            f"{where}none of its parameters has a gradient, and no_sync holds back those of unit "
            f"{held_back[0][1].buffer.name}. Run the last micro-batch's forward outside no_sync, {forget}"
        )
    for param, (buffer, slot) in held_back:
        if param.grad is not None and buffer.reductions.holds_back(slot):
            raise RuntimeError(
                f"{where}of parameter {buffer.slots[slot].name!r} no_sync holds back gradients that came after those "
                f"that were reduced. Let the last backward before a step be of a forward outside no_sync, {forget}"
            )
