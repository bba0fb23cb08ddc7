"""The optimizers under comparison, each with the sharding that it works on, and a rank that steps one of them.

All of them train the same model from the same values on the same data, with the example's options; those for matrices
leave embeddings, head and norms to AdamW. Sharded models run operator by operator: what is measured is the optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from profiling import StepProfile, profiled
from states import state_bytes
from systems import SYSTEMS
from torch import Tensor, nn
from torch.optim import Optimizer
from worker import FirstStep, Step, Trainer
from workload import LEARNING_RATE, Policy, Workload

import vescale_compile as vc
from vescale_compile.examples.optimizers import BETAS, RECIPES, WEIGHT_DECAY
from vescale_compile.optim.hidden import is_hidden_matrix


@dataclass(frozen=True)
class Contender:
    """An optimizer on a sharded model.

    Attributes:
        sharding: by what the model is sharded.
        shard: does it, in place.
        build: makes the optimizers of all parameters.
        package: which it needs beside PyTorch and this project.
    """

    sharding: str
    shard: Callable[[nn.Module, Workload], object]
    build: Callable[[nn.Module], Sequence[Optimizer]]
    package: str | None = None


def _ours(recipe: str) -> Contender:
    def shard(model: nn.Module, workload: Workload) -> None:
        vc.fully_shard(model, mp_policy=workload.mixed_precision, granularity=RECIPES[recipe].granularity())

    return Contender("fully_shard", shard, lambda model: [RECIPES[recipe].build(model, LEARNING_RATE)])


def _on_fsdp2(build: Callable[[nn.Module], Sequence[Optimizer]], package: str | None = None) -> Contender:
    def shard(model: nn.Module, workload: Workload) -> None:
        SYSTEMS["fsdp2"].distribute(model, workload, Policy.KEEP)

    return Contender("FSDP2", shard, build, package)


_adamw = functools.partial(torch.optim.AdamW, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def _torch_muon(model: nn.Module) -> Sequence[Optimizer]:
    hidden = [param for name, param in model.named_parameters() if is_hidden_matrix(name, param)]
    rest = [param for name, param in model.named_parameters() if not is_hidden_matrix(name, param)]
    muon = torch.optim.Muon(hidden, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return muon, _adamw(rest)


def _torchao_adamw8bit(model: nn.Module) -> Sequence[Optimizer]:
    from torchao.optim import AdamW8bit  # type: ignore[import-untyped]  # of tests and benchmarks only

    return (AdamW8bit(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY),)


CONTENDERS = {
    "torch.optim.AdamW": _ours("adamw"),
    "vc.optim.AdamW8bit": _ours("adamw8bit"),
    "vc.optim.Muon": _ours("muon"),
    "vc.optim.Shampoo": _ours("shampoo"),
    "torch.optim.AdamW, FSDP2": _on_fsdp2(lambda model: [_adamw(model.parameters())]),
    "torchao AdamW8bit, FSDP2": _on_fsdp2(_torchao_adamw8bit, "torchao"),
    "torch.optim.Muon, FSDP2": _on_fsdp2(_torch_muon),
}


class OptimizerTrainer(Trainer):
    """A rank that measures nothing of a training step but what the optimizer does in it."""

    def set_up(self) -> None:
        contender = CONTENDERS[self.job.system]
        contender.shard(self.model, self.job.workload)
        self.forward = self.model
        self.optimizers = contender.build(self.model)

    def first_step(self) -> FirstStep:
        """As ``step``; no gradients are compared."""
        return FirstStep(self.step(), math.nan)

    def step(self) -> Step:
        """One training step; the times are the optimizer's."""
        loss = self.gradients()
        step = self.timed(lambda: self._optimize(loss))
        self._forget_gradients()
        return step

    def profile(self) -> StepProfile:
        """What the optimizer does in one more training step."""
        loss = self.gradients()
        profile = profiled(lambda: self._optimize(loss), self.job.world_size, self.device)
        self._forget_gradients()
        return profile

    def states(self) -> int:
        """Bytes of this rank's optimizer states."""
        return state_bytes(self.optimizers)

    def parameters(self) -> int:
        """Parameters of the model, all ranks together."""
        return sum(param.numel() for param in self.model.parameters())

    def _optimize(self, loss: Tensor) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def _forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
