"""The Llama-style decoder with mixtures of experts: fused expert weights, top-k routing, static shapes.

Like `llama`, it is written as a user would write it. The experts' matrices are one parameter [experts, m, n] for
each projection, as batched and grouped matrix multiplication take them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .llama import INIT_STD, Llama, LlamaConfig


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """Shape of a model; `hidden_dim` is the inner width of one expert.

    `capacity_factor` sets how many tokens an expert has room for: that many times its share under even routing.
    """

    experts: int = 8
    top_k: int = 2
    capacity_factor: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k is {self.top_k} of {self.experts} experts; a token goes to at least 1 and at most all of them"
            )
        if not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor is {self.capacity_factor}; it must be above 0")

    def capacity(self, tokens: int) -> int:
        """Tokens that one expert takes of a batch of `tokens`: at least 1, at most all."""
        even = self.capacity_factor * self.top_k * tokens / self.experts
        return min(tokens, max(1, round(even)))


SIZES = {
    "tiny": MoeConfig(layers=2, dim=32, heads=4, kv_heads=2, hidden_dim=64, experts=4),
    "50M": MoeConfig(layers=6, dim=512, heads=8, kv_heads=4, hidden_dim=608, experts=8),
}
"""Named shapes, with the byte vocabulary; "50M" is named for its number of parameters."""


class Experts(nn.Module):
    """SwiGLU experts of which each token takes `top_k`, weighted by the router (Mixtral, arXiv 2401.04088).

    An expert takes tokens in their order until its capacity is full; the rest pass by it, and only the residual
    connection carries them (Switch Transformers, arXiv 2101.03961, section 2.2). So all shapes are static: the
    tokens of all experts are one [experts, capacity, dim] tensor, whatever the router decides.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(config.experts, config.dim, config.ffn_dim))
        self.up = nn.Parameter(torch.empty(config.experts, config.dim, config.ffn_dim))
        self.down = nn.Parameter(torch.empty(config.experts, config.ffn_dim, config.dim))

    def reset_parameters(self, residual_std: float) -> None:
        """Draw the experts anew, normal; `residual_std` is for the projection that adds to the residual stream."""
        for weight, std in ((self.gate, INIT_STD), (self.up, INIT_STD), (self.down, residual_std)):
            nn.init.normal_(weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(dim=-1).topk(self.config.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        slots, sources = self.assign(chosen)

        # One more row of zeros: what empty slots read, and what tokens get of an expert that had no room.
        taken = F.pad(tokens, (0, 0, 0, 1))[sources]
        hidden = F.silu(torch.bmm(taken, self.gate)) * torch.bmm(taken, self.up)
        results = F.pad(torch.bmm(hidden, self.down).flatten(0, 1), (0, 0, 0, 1))
        return (results[slots] * weights.type_as(x).unsqueeze(-1)).sum(dim=1).view_as(x)

    def assign(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Slots of the tokens, and tokens of the slots, for choices of experts [tokens, top_k], int64.

        Returns for each choice its slot, of experts x capacity and one more for those without room; and as
        [experts, capacity] the token of each slot, one past the last for empty ones.
        """
        tokens, experts = chosen.shape[0], self.config.experts
        capacity = self.config.capacity(tokens)
        picked = F.one_hot(chosen.flatten(), experts)
        place = ((picked.cumsum(dim=0) - 1) * picked).sum(dim=-1).view_as(chosen)  # in the expert's queue
        slots = torch.where(place < capacity, chosen * capacity + place, experts * capacity)
        numbers = torch.arange(tokens, device=chosen.device).unsqueeze(-1).expand_as(chosen)
        empty = torch.full((experts * capacity + 1,), tokens, device=chosen.device)
        sources = empty.scatter(0, slots.flatten(), numbers.flatten())[:-1]
        return slots, sources.view(experts, capacity)


class MoeLlama(Llama):
    """`Llama` with `Experts` for the feed-forward part of every layer; called and initialized like it."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)
        for block in self.layers:
            block.feed_forward = Experts(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in `Llama`, experts and routers too."""
        super().reset_parameters()
        residual_std = INIT_STD / (2 * self.config.layers) ** 0.5
        for module in self.modules():
            if isinstance(module, Experts):
                module.reset_parameters(residual_std)
