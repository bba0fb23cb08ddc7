"""Models and training loops that the tests of the compiler share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpus import at_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vescale_compile as vc
from vescale_compile.cost import PRESETS, Cluster
from vescale_compile.examples.llama import Llama, LlamaConfig

Batch = tuple[Tensor, Tensor]
Model = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

REFERENCE_TIMEOUT = timedelta(minutes=4)

H100 = at_once(PRESETS["h100"](2))
"""What their hosts take would else be most of a tiny model's step."""
SLOW_WIRE = replace(H100, start=0.0, within=replace(H100.within, bandwidth=1e6, latency=0.0))
"""A cluster on which communication takes far longer than computation, in proportion to its bytes."""
FAST_WIRE = replace(SLOW_WIRE, within=replace(SLOW_WIRE.within, bandwidth=1e9))
"""One on which computation takes longer."""


class Block(nn.Module):
    """Sizes 13, 7 and 1: nothing divides by anything."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 7)
        self.down = nn.Linear(7, 13, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Uneven(nn.Module):
    """Embedding, blocks and head; ``forward(tokens, labels)`` returns the loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(13, 11)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class CheckpointedLayers(Uneven):
    """Each layer runs again for its backward."""

    def __init__(self, layers: int, reentrant: bool) -> None:
        super().__init__(layers)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class HuggingFace(nn.Module):
    """A causal language model of transformers, called for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


def llama() -> nn.Module:
    return Llama(LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=64))


def one_layer_llama() -> nn.Module:
    """Where how deep a model is makes no difference: it compiles in half of the time."""
    return Llama(LlamaConfig(layers=1, dim=32, heads=4, kv_heads=2))


def hf_llama(layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    config = Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    return HuggingFace(LlamaForCausalLM(config))


def hf_llama_of_one_layer() -> nn.Module:
    return hf_llama(layers=1)


def hf_gpt_oss(layers: int = 2) -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=8,
    )
    return HuggingFace(GptOssForCausalLM(config))


def hf_gpt_oss_of_one_layer() -> nn.Module:
    return hf_gpt_oss(layers=1)


def many_words() -> nn.Module:
    """An embedding and a head of a mebibyte each."""
    return Llama(LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2, vocab_size=8192))


def wide() -> nn.Module:
    """Attention and feed-forward of more than a mebibyte each."""
    return Llama(LlamaConfig(layers=1, dim=320, heads=4, kv_heads=4, vocab_size=64))


DEEP = 4


def deep() -> nn.Module:
    return Uneven(DEEP)


def build(model: Model, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return model()


def batches(steps: int, vocab: int, rank: int | None = None, shape: tuple[int, int] = (2, 12)) -> list[Batch]:
    """Each rank's own data, the same at every call."""
    generator = torch.Generator().manual_seed(1000 + (dist.get_rank() if rank is None else rank))
    return [
        (
            torch.randint(0, vocab, shape, generator=generator),
            torch.randint(0, vocab, shape, generator=generator),
        )
        for _ in range(steps)
    ]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Iterable[nn.Parameter], lr: float = 1e-1) -> torch.optim.Optimizer:
    """What a comparison takes that does not name another one. AdamW divides by a gradient's size: it hides a gradient
    that is twice what it should be, and makes a step of the last bits of a small one."""
    return torch.optim.SGD(params, lr=lr)


def gentle_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For programs that diverge, or whose rounding grows, by larger steps."""
    return sgd(params, lr=1e-2)


def sharded(
    model: Model,
    *,
    compile: str | None = "eager",
    cluster: Cluster | None = None,
    shard: Callable[..., nn.Module] = vc.fully_shard,
    **shard_options: Any,
) -> tuple[nn.Module, nn.Module]:
    """The sharded model, and what to call: compiled with the lowering named, or the model itself."""
    built = shard(build(model), **shard_options)
    if compile is None:
        return built, built
    return built, torch.compile(built, backend="vescale", options={"lowering": compile, "cluster": cluster})


def assert_gradients_of(model: nn.Module, reference: nn.Module, *, atol: float) -> None:
    """The sharded model has the gradients that the unsharded one has, of the same loss on every rank."""
    for param, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert param.grad is None or not param.grad.full_tensor().any()
        else:
            torch.testing.assert_close(param.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=atol)


def train(
    call: nn.Module, params: Iterable[nn.Parameter], data: list[Batch], make_optimizer: MakeOptimizer = sgd
) -> list[float]:
    optimizer = make_optimizer(params)
    losses = []
    for tokens, labels in data:
        loss = call(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_unsharded(
    model: Model,
    data: list[Batch],
    backend: str | None = None,
    through: Callable[[Tensor], Tensor] | None = None,
    make_optimizer: MakeOptimizer = sgd,
) -> tuple[nn.Module, list[float]]:
    """The reference: the whole model, compiled by `backend` if there is one. Rank 0 trains it on the batches of all
    ranks with the mean of their gradients, and every rank gets the parameters and the losses of its own batches. A step
    computes with what `through` makes of the parameters."""
    built = build(model)
    optimizer = make_optimizer(built.parameters())
    batches_of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(batches_of_all, data)
    losses = [_train_on_all(built, optimizer, batches_of_all, backend, through) if dist.get_rank() == 0 else None]
    dist.monitored_barrier(timeout=REFERENCE_TIMEOUT)  # a compilation takes longer than a collective may
    dist.broadcast_object_list(losses)
    for param in built.parameters():
        dist.broadcast(param.data, 0)
    assert losses[0] is not None
    return built, losses[0][dist.get_rank()]


def _train_on_all(
    built: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches_of_all: list[list[Batch]],
    backend: str | None,
    through: Callable[[Tensor], Tensor] | None,
) -> list[list[float]]:
    """The losses, by rank and step."""
    call = torch.compile(built, backend=backend) if backend else built
    losses: list[list[float]] = [[] for _ in batches_of_all]
    for step in zip(*batches_of_all, strict=True):
        masters = [param.detach().clone() for param in built.parameters()]
        if through is not None:
            for param, master in zip(built.parameters(), masters, strict=True):
                param.data.copy_(through(master))
        for rank, (tokens, labels) in enumerate(step):
            loss = call(tokens, labels)
            loss.backward()
            losses[rank].append(loss.item())
        for param, master in zip(built.parameters(), masters, strict=True):
            param.data.copy_(master)
            if param.grad is not None:
                param.grad /= len(batches_of_all)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def average_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters, gathered, by name."""
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}  # type: ignore[attr-defined]


def largest_difference(ours: nn.Module | dict[str, Tensor], reference: nn.Module) -> float:
    """Over all parameters, gathered; names must be the same."""
    found, theirs = whole(ours) if isinstance(ours, nn.Module) else ours, dict(reference.named_parameters())
    assert list(found) == list(theirs)
    return max((param - theirs[name]).abs().max().item() for name, param in found.items())
