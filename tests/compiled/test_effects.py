"""Operators that PyTorch keeps in their order with tokens, which graphs make before anything else."""

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`

_seen: list[float] = []


@torch.library.custom_op("tests::see", mutates_args=())
def see(weight: Tensor) -> None:
    _seen.append(weight.sum().item())


see.register_fake(lambda weight: None)
_register_effectful_op(torch.ops.tests.see.default, _EffectType.ORDERED)


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList([torch.full((8,), number)]) for number in (1.0, 2.0, 3.0))

    def forward(self, x: Tensor) -> Tensor:
        for (weight,) in self.layers:
            torch.ops.tests.see(weight)
            x = x * weight
        return x


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2)
def test_operators_with_effects_may_read_parameters(lowering):
    torch._dynamo.reset()
    _seen.clear()
    call = torch.compile(vc.fully_shard(Watched()), backend="vescale", options={"lowering": lowering})
    loss = call(torch.ones(8))
    assert _seen == [8.0, 16.0, 24.0]
    assert loss.tolist() == [6.0] * 8
    loss.sum().backward()
