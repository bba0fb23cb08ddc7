"""Muon on shards gives torch.optim.Muon's bits, whatever the layout and the number of ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_cases import (
    MATRICES,
    STACKS,
    TorchMuon,
    between_experts,
    give_grads,
    muon,
    random_tensors,
    shard,
    uneven,
    whole,
)
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.optim.muon import Muon

pytestmark = pytest.mark.slow  # left out of `make test-fast`

SHAPES = MATRICES + STACKS
STEPS = 3
NEVER: list[set[int]] = [set()] * STEPS

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no nesterov": {"nesterov": False},
    "original": {"adjust_lr_fn": "original", "lr": 0.02},
    "match rms": {"adjust_lr_fn": "match_rms_adamw", "lr": 0.02, "weight_decay": 0.0},
    "tensor lr": {"lr": torch.tensor(0.02), "momentum": 0.9},
    "iteration": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 1e-4},
}


def assert_equal_to_torch(
    params: list[Tensor], idle: list[set[int]] = NEVER, *, exchange_bytes: int = 1 << 20, **options: Any
) -> None:
    """Steps of Muon on `params` and of torch.optim.Muon on the whole of them; `idle` ones have no gradient."""
    fulls = [whole(param) for param in params]
    optimizer, reference = muon(params, exchange_bytes=exchange_bytes, **options), TorchMuon(fulls, **options)
    for step, absent in enumerate(idle, start=1):
        drawn = random_tensors([tuple(full.shape) for full in fulls], seed=step)
        grads = [None if i in absent else grad for i, grad in enumerate(drawn)]
        give_grads(params, grads)
        optimizer.step()
        reference.step(grads)
    for i, (param, expected) in enumerate(zip(params, reference.values(), strict=True)):
        assert torch.equal(whole(param), expected), f"parameter {i} of shape {tuple(param.shape)}"


def sharded(shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [shard(full, uneven(tuple(full.shape), seed=1)) for full in random_tensors(shapes, seed=0)]


def plain() -> list[Tensor]:
    return [nn.Parameter(full) for full in random_tensors(SHAPES, seed=0)]


@on_ranks(1, 2, 3, 4)
def test_every_matrix_equals_torch_optim_muons() -> None:
    assert_equal_to_torch(sharded())


@on_ranks(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_what_they_mean_in_torch_optim(name: str) -> None:
    assert_equal_to_torch(sharded(), **OPTIONS[name])


@on_ranks(3)
def test_bfloat16_parameters_are_equal_however_they_are_cut() -> None:
    # Not to torch.optim.Muon: PyTorch's own bfloat16 additions on CPU round by an element's place.
    shapes: list[tuple[int, ...]] = [(60, 5, 13)]  # two vectors of elements and one left over, each, before cutting
    fulls = random_tensors(shapes, seed=0, dtype=torch.bfloat16)
    whole_ones = [nn.Parameter(full.clone()) for full in fulls]
    cut = [shard(full, vc.RaggedShard((0, 1, 2), (1210, 1340, 1350))) for full in fulls]
    for params in (whole_ones, cut):
        optimizer = muon(params, lr=0.03)
        for step in range(STEPS):
            give_grads(params, random_tensors(shapes, seed=step, dtype=torch.bfloat16))
            optimizer.step()
    assert all(torch.equal(a, whole(b)) for a, b in zip(whole_ones, cut, strict=True))


@on_ranks(2, 3)
@pytest.mark.parametrize("exchange_bytes", [1, 3000])
def test_the_size_of_exchanges_changes_no_bit(exchange_bytes: int) -> None:
    assert_equal_to_torch(sharded(), exchange_bytes=exchange_bytes)


@on_ranks(2, 4)
def test_stacks_cut_between_experts() -> None:
    stacks = random_tensors([(4, 8, 12), (5, 12, 6), (2, 9, 9)], seed=0)
    assert_equal_to_torch([shard(stack, between_experts(tuple(stack.shape))) for stack in stacks])


@on_ranks(3)
def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    assert_equal_to_torch(sharded(), idle=[{1, 8}, set(), {0, 1, 9}, set(range(len(SHAPES)))])


@on_ranks(2)
def test_sharded_parameters_beside_whole_ones() -> None:
    assert_equal_to_torch(sharded() + plain())


def test_unsharded_parameters_need_no_process_group() -> None:
    assert_equal_to_torch(plain())


def test_a_transposed_gradient_of_an_unsharded_matrix() -> None:
    full, grad = random_tensors([(12, 20), (20, 12)], seed=0)
    param, reference = nn.Parameter(full), TorchMuon([full])
    param.grad = grad.T
    muon([param]).step()
    reference.step([grad.T])
    assert torch.equal(param, reference.values()[0])


@on_ranks(2, 3)
def test_a_sharded_model_steps_like_an_unsharded_one() -> None:
    """Muon's and AdamW's parameters, as views of their units' shards, with real gradients."""
    torch.manual_seed(0)
    model = Experts()
    reference = copy.deepcopy(model)
    vc.fully_shard(model, granularity=Muon.granularity)
    ours, theirs = Muon(model.named_parameters(), lr=0.02), Muon(reference.named_parameters(), lr=0.02)
    for step in range(STEPS):
        tokens = torch.arange(12).view(2, 6) * (step + dist.get_rank() + 1) % 11
        model(tokens).square().mean().backward()
        for param, copied in zip(model.parameters(), reference.parameters(), strict=True):
            copied.grad = whole(param.grad).clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
        assert torch.equal(model(tokens), reference(tokens))
    for param, copied in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(param), copied)


@on_ranks(4)
def test_replicas_of_shards_step_alike() -> None:
    torch.manual_seed(0)
    model = Experts()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    vc.fully_shard(model, mesh=mesh, granularity=Muon.granularity)
    for members in (model, reference):
        optimizer = Muon(members.named_parameters())
        for step in range(STEPS):
            params = list(members.parameters())
            give_grads(params, random_tensors([tuple(param.shape) for param in params], seed=step))
            optimizer.step()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(param), expected)


class Experts(nn.Module):
    """An embedding, blocks with a matrix and a stack of experts, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bsd,edh->bsh", self.mix(x), self.experts).tanh()
