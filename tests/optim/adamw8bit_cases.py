"""Parameters, gradients and comparisons that the tests of AdamW8bit share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import vescale_compile as vc
from vescale_compile.ragged.redistribute import distribute_ragged

SHAPES = [(64, 96), (50, 200), (4, 32, 48), (5000,), (300,), ()]


def three_decades(shape: tuple[int, ...], seed: int) -> Tensor:
    """Gradients whose elements differ by three orders of magnitude, each element's own size being the same for all
    seeds."""
    sizes = 10.0 ** (-3 * torch.rand(shape, generator=torch.Generator().manual_seed(math.prod(shape))))
    return sizes * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adamw8bit(params: Any, **options: Any) -> vc.optim.AdamW8bit:
    return vc.optim.AdamW8bit(params, **{"lr": 0.01, "compile": False, **options})


# Plain parameters.


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    for param in params:
        param.grad = three_decades(tuple(param.shape), seed=step).to(param.dtype)


def contents(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of parameters and states."""
    states = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
    return [t.detach().clone() for t in (*params, *states)]


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# A model, whole or sharded.


class Layer(nn.Module):
    """Matrices with and without ragged edges, a long vector, and a short one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.randn(64, 96))
        self.bias = nn.Parameter(torch.randn(70))
        self.ragged = nn.Parameter(torch.randn(50, 200))
        self.stack = nn.Parameter(torch.randn(3, 40, 64))
        self.long = nn.Parameter(torch.randn(5000))
        self.last = nn.Parameter(torch.randn(96, 64))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def sharded(blocks: dict[str, Any]) -> nn.Module:
    return vc.fully_shard(model(), granularity=vc.optim.AdamW8bit.granularity_for(**blocks))


def full(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, vc.RaggedDTensor) else tensor.detach()


def gradient(param: Tensor, seed: int) -> Tensor:
    """The same for a whole parameter and for its shards."""
    whole = three_decades(tuple(param.shape), seed)
    return (
        distribute_ragged(whole, param.device_mesh, param.placement) if isinstance(param, vc.RaggedDTensor) else whole
    )


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        for ordinal, param in enumerate(module.parameters()):
            # In the second step some have none.
            param.grad = gradient(param, 100 * step + ordinal) if step != 1 or ordinal % 5 else None
        optimizer.step()


def assert_same_as_unsharded(
    module: nn.Module, optimizer: torch.optim.Optimizer, whole: nn.Module, expected: torch.optim.Optimizer
) -> None:
    """Parameters and states, bit for bit."""
    for param, reference in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(full(param), reference)
        state, reference_state = optimizer.state[param], expected.state[reference]
        assert state.keys() == reference_state.keys()
        assert all(torch.equal(full(state[key]), reference_state[key]) for key in state)
