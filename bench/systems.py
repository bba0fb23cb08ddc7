"""The systems under comparison, each one function: take a model, return its forward, distributed.

All of them train the same module, built from the same seed, with the same optimizer on ``model.parameters()``.
Each is set up as its own documentation recommends, and sharded ones form the same units: every decoder layer,
and the rest (embedding, last norm, output projection).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import vescale_compile as vc
from vescale_compile.examples.llama import SIZES, Llama

Forward = Callable[[Tensor, Tensor], Tensor]
"""(tokens, labels), both int64 [batch, seq], to the mean loss, a scalar"""

LEARNING_RATE = 1e-3


class Policy(StrEnum):
    """What becomes of unsharded parameters between forward and backward."""

    REPLICATED = "unsharded"  # never sharded
    RESHARD = "reshard"  # freed after forward, gathered again in backward (ZeRO-3)
    KEEP = "keep"  # kept until backward (reshard_after_forward=False)


@dataclass(frozen=True)
class Workload:
    """What every system trains.

    Attributes:
        model: a name of ``vescale_compile.examples.llama.SIZES``.
        batch: sequences for each rank and step.
        seq: tokens of a sequence.
        dtype: "fp32", or "bf16": forward and backward in bf16 on fp32 master parameters and optimizer states.
            Sharded systems gather in bf16 and reduce in fp32; DDP uses autocast and reduces in fp32.
        device: "cpu" or "cuda".
        seed: of the parameters, and with the rank of the data.
    """

    model: str
    batch: int
    seq: int
    dtype: str
    device: str
    seed: int

    def build_model(self) -> nn.Module:
        """The unsharded model on the workload's device, with the same values in every process."""
        torch.manual_seed(self.seed)
        with torch.device(self.device):
            return Llama(SIZES[self.model])

    def build_batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of one rank. Every step trains on this batch, so the loss falls as it is learned."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank)
        text = torch.randint(SIZES[self.model].vocab_size, (self.batch, self.seq + 1), generator=generator)
        text = text.to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over the parameters as the system left them."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """The workload's dtype, as sharded systems take it."""
        if self.dtype == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class System:
    """One way to train a model on several ranks.

    Attributes:
        distribute: called on every rank after ``init_process_group`` with a model from
            ``Workload.build_model``. May replace the model's parameters in place.
        policies: under which it can run; each is measured for itself.
    """

    name: str
    distribute: Callable[[nn.Module, Workload, Policy], Forward]
    policies: tuple[Policy, ...]


SHARDED = (Policy.RESHARD, Policy.KEEP)


def _ddp(model: nn.Module, workload: Workload, policy: Policy, *, compiled: bool) -> Forward:
    # Gradients as views of the buckets: without it DDP holds every gradient twice.
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    run = torch.compile(replica, dynamic=False) if compiled else replica

    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(workload.device, torch.bfloat16, enabled=workload.dtype == "bf16"):
            return run(tokens, labels)

    return forward


def _fsdp2(model: nn.Module, workload: Workload, policy: Policy, *, compiled: bool) -> Forward:
    layers = model.get_submodule("layers").children()
    for layer in layers:
        if compiled:
            layer.compile(dynamic=False)
        fully_shard(layer, reshard_after_forward=policy is Policy.RESHARD, mp_policy=workload.mixed_precision)
    # None is FSDP2's default for the root: the backward needs its parameters at once, so they are kept.
    fully_shard(
        model,
        reshard_after_forward=None if policy is Policy.RESHARD else False,
        mp_policy=workload.mixed_precision,
    )
    return model


def _vescale(model: nn.Module, workload: Workload, policy: Policy, *, lowering: str) -> Forward:
    vc.fully_shard(model, reshard_after_forward=policy is Policy.RESHARD, mp_policy=workload.mixed_precision)
    return torch.compile(model, backend="vescale", options={"lowering": lowering}, dynamic=False)


OURS = "vescale"

SYSTEMS = {
    system.name: system
    for system in (
        System("ddp", functools.partial(_ddp, compiled=False), (Policy.REPLICATED,)),
        System("ddp-compile", functools.partial(_ddp, compiled=True), (Policy.REPLICATED,)),
        System("fsdp2", functools.partial(_fsdp2, compiled=False), SHARDED),
        System("fsdp2-compile", functools.partial(_fsdp2, compiled=True), SHARDED),
        System(OURS, functools.partial(_vescale, lowering="inductor"), SHARDED),
        System("vescale-eager-lowering", functools.partial(_vescale, lowering="eager"), SHARDED),
    )
}
