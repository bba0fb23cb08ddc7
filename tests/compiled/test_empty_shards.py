"""Units of which a rank holds no element: its optimizer has nothing to do there, and still all ranks do the same."""

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

import vescale_compile as vc
from vescale_compile.runtime import crossing

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Decay(torch.optim.Optimizer):
    """Does the same to every element of all parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch._foreach_mul_(self.param_groups[0]["params"], 0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "decay": Decay,
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW8bit": lambda params: vc.optim.AdamW8bit(params, compile=False),
    "Muon": vc.optim.Muon,
    "Shampoo": lambda params: vc.optim.Shampoo(params, block=16, compile=False),
}


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs.sum()


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_a_step_after_a_forward_without_a_backward_is_seen_on_every_rank(name):
    torch.manual_seed(0)
    torch._dynamo.reset()
    crossing.forget_carried()
    model = vc.fully_shard(TwoMatrices(), granularity=lambda name, param: vc.Whole())
    assert [param.to_local().numel() for param in model.parameters()] == [32 * 32 * (dist.get_rank() == 0)] * 2
    call = torch.compile(model, backend="vescale", options={"lowering": "eager", "cluster": models.SLOW_WIRE})
    optimizer = OPTIMIZERS[name](model.named_parameters())
    inputs = torch.randn(4, 32)
    call(inputs).backward()
    call(inputs)  # gathers for a backward that does not come
    optimizer.step()
    optimizer.zero_grad()
    call(inputs).backward()
    compiled = gradients(model)
    optimizer.zero_grad()
    model(inputs).backward()
    assert all(map(torch.equal, compiled, gradients(model)))
