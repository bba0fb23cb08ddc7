"""What every system trains: a model, a batch, an optimizer, all made from seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_compile.examples import llama, moe

Forward = Callable[[Tensor, Tensor], Tensor]
"""(tokens, labels), both int64 [batch, seq], to the mean loss, a scalar"""

LEARNING_RATE = 1e-3

FOUR_LAYERS: dict[str, llama.LlamaConfig] = {
    "3M": llama.LlamaConfig(layers=4, dim=256, heads=8, kv_heads=4),
    "12M": llama.LlamaConfig(layers=4, dim=512, heads=8, kv_heads=4),
    "28M": llama.LlamaConfig(layers=4, dim=768, heads=12, kv_heads=4),
}
"""Shallow, so that they compile fast where many are measured"""

WORDS = {"29M-16k": llama.LlamaConfig(layers=4, dim=512, heads=8, kv_heads=4, vocab_size=16_384)}
"""12M with the vocabulary of words, not bytes: its embedding and its head are each 2.8 times as large as a layer"""

MODELS: dict[str, llama.LlamaConfig] = {
    **llama.SIZES,
    **FOUR_LAYERS,
    **WORDS,
    **{f"moe-{name}": config for name, config in moe.SIZES.items()},
}
"""By the name that ``--model`` takes."""


class Policy(StrEnum):
    """What becomes of unsharded parameters between forward and backward."""

    REPLICATED = "unsharded"  # never sharded
    RESHARD = "reshard"  # freed after forward, gathered again in backward (ZeRO-3)
    KEEP = "keep"  # kept until backward (reshard_after_forward=False)


@dataclass(frozen=True)
class Workload:
    """What every system trains.

    Attributes:
        model: a name of ``MODELS``.
        batch: sequences for each rank and micro-batch.
        seq: tokens of a sequence.
        dtype: "fp32", or "bf16": forward and backward in bf16 on fp32 master parameters and optimizer states.
            Sharded systems gather in bf16 and reduce in fp32; DDP uses autocast and reduces in fp32.
        device: "cpu" or "cuda".
        seed: of the parameters, and with the rank of the data.
        micro_batches: of so many sequences each, whose gradients a step averages.
    """

    model: str
    batch: int
    seq: int
    dtype: str
    device: str
    seed: int
    micro_batches: int = 1

    def build_model(self) -> nn.Module:
        """The unsharded model on the workload's device, with the same values in every process."""
        torch.manual_seed(self.seed)
        config = MODELS[self.model]
        with torch.device(self.device):
            return moe.MoeLlama(config) if isinstance(config, moe.MoeConfig) else llama.Llama(config)

    def build_batch(self, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of one rank. Every step, all its micro-batches, trains on this, so the loss falls as it is
        learned."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank)
        text = torch.randint(MODELS[self.model].vocab_size, (self.batch, self.seq + 1), generator=generator)
        text = text.to(self.device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over the parameters as the system left them, fused: a third of foreach's time and no memory besides."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """The workload's dtype, as sharded systems take it."""
        if self.dtype == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
