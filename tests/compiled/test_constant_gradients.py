"""Gradients that are the same for every loss are reduced in the backward all the same."""

from typing import Any

import models
import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Decayed(torch.autograd.Function):
    """Its gradient is of the parameter alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * 0.1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))


class OfTheParameter(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x @ Decayed.apply(layer.weight))
        return x.square().mean()


class Zero(Layers):
    """Inductor computes the last layer's gradient when it compiles."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return (x @ (self.layers[2].weight * 0 + 1)).square().mean()


@pytest.mark.parametrize(("program", "lowering"), [(OfTheParameter, "eager"), (Zero, "inductor")])
@on_ranks(2)
def test_gradients_that_do_not_depend_on_the_loss(program, lowering):
    torch._dynamo.reset()
    model, call = models.sharded(program, compile=lowering, reshard_after_forward=False)
    reference = models.build(program)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    call(x).backward()
    reference(x).backward()
    for param, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), theirs.grad)
