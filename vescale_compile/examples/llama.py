"""A Llama-style decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

It is written as a user would write it, with nothing in it that knows of sharding or of a backend.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02
ROTARY_BASE = 10_000.0
HIDDEN_MULTIPLE = 64


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a model. `hidden_dim` is SwiGLU's inner width; None takes 8/3 of `dim`, rounded up to 64."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden_dim: int | None = None
    vocab_size: int = 256
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "kv_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden_dim is not None and self.hidden_dim < 1:
            raise ValueError(f"hidden_dim is {self.hidden_dim}; it must be at least 1")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim {self.dim} over {self.heads} heads must give each head an even number of features "
                "(the rotary embedding turns pairs); change dim or heads"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: "
                "each key-value head serves the same number of query heads"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def ffn_dim(self) -> int:
        """Inner width of the feed-forward layer."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return -(-8 * self.dim // (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE


SIZES = {
    "tiny": LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2),
    "small": LlamaConfig(layers=4, dim=128, heads=4, kv_heads=2),
    "30M": LlamaConfig(layers=10, dim=512, heads=8, kv_heads=4),
    "125M": LlamaConfig(layers=20, dim=768, heads=12, kv_heads=4),
    "1B": LlamaConfig(layers=23, dim=2048, heads=32, kv_heads=8),
}
"""Named shapes, with the byte vocabulary; "30M" and up are named for their number of parameters."""


def rotary_angles(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (RoFormer, arXiv 2104.09864, eq. 34), fp32.

    Each has shape [length, head_dim / 2]. They are computed at each forward: a buffer would need care when
    the model is built on the meta device, and the cost is that of one row of activations.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn feature i together with feature i + head_dim / 2 by the angle of its position.

    `x` is [batch, heads, length, head_dim]; computed in fp32, returned in the dtype of `x`.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each on a normalized input and added to the residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Decoder-only language model.

    Built under `torch.device("meta")`, it is initialized by `to_empty(device=...)` and `reset_parameters()`.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        # With tied embeddings there is no second parameter to keep equal to the first: `to_empty` on a model
        # of the meta device gives each module that holds a shared parameter one of its own.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew: normal, and the projections that add to the residual stream scaled down
        by sqrt(2 · layers), as in GPT-2; norms are ones."""
        residual_std = INIT_STD / (2 * self.config.layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                adds_to_residual = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=residual_std if adds_to_residual else INIT_STD)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocab_size], or with `labels` the mean cross-entropy in nats (fp32 scalar).

        `tokens` and `labels` are int64 [batch, length]; labels[:, i] is the token that follows tokens[:, i].
        """
        cos, sin = rotary_angles(tokens.shape[1], self.config.head_dim, tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        logits: Tensor = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
