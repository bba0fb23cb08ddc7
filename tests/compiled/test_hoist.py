"""Which regions of a captured graph are let in."""

import pytest
import torch
from ranks import fake_world
from torch import Tensor, nn

import vescale_compile as vc


@torch.compiler.nested_compile_region
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sin(x * weight[0])


class Nested(nn.Linear):
    def forward(self, x):
        return scaled(x, self.weight) + self.bias


def test_nested_regions_are_refused():
    """Their forwards hand views of gathered parameters to their backwards, when the slot may hold other ones."""
    torch._dynamo.reset()
    with fake_world(2):
        call = torch.compile(vc.fully_shard(nn.Sequential(*(Nested(4, 4) for _ in range(4)))), backend="vescale")
        with pytest.raises(Exception, match=r"\[rank 0\] torch.compiler.nested_compile_region is not supported: leave"):
            call(torch.ones(2, 4))
