"""In which shape generated code stores what matrix products read."""

import pytest
import torch
from ranks import fake_world
from torch import Tensor, nn
from written import code_written_for

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`

BATCH, LENGTH, HEADS, SIZE = 2, 8, 4, 4


class Heads(nn.Module):
    """What is computed from two projections, by head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.second(self.first(x)).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)
        real, imaginary = heads.split(SIZE // 2, dim=-1)
        return (real.sin() * imaginary).sum()


def test_a_gradient_that_two_products_read_is_stored_in_the_shape_in_which_it_is_computed():
    """Else a kernel of its own copies it into the products', where that of what computes it has other loops."""
    torch._dynamo.reset()
    with fake_world(2):
        call = torch.compile(vc.fully_shard(Heads()), backend="vescale")
        _, backward = code_written_for(lambda: call(torch.ones(BATCH, LENGTH, HEADS * SIZE)).backward())
    assert f"empty_strided_cpu({(BATCH, LENGTH, HEADS, SIZE)}," in backward


class Largest(nn.Module):
    """A product reads one of the two results of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).topk(SIZE).values).sum()


def test_what_is_one_of_several_results_is_read_as_it_is():
    torch._dynamo.reset()
    with fake_world(2):
        call = torch.compile(vc.fully_shard(Largest()), backend="vescale")
        forward, _ = code_written_for(lambda: call(torch.ones(BATCH, SIZE)).backward())
    assert "torch.ops.aten.topk.default(" in forward
