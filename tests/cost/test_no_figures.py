"""Compilation needs no figures: what the cost model knows nothing of is estimated, and the model trains."""

import pytest
import torch
from ranks import fake_world
from torch import Tensor, nn

import vescale_compile as vc


class Product(nn.Module):
    """A linear layer, and a product of what is not differentiated."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        counts = x.detach().to(self.dtype)
        return (self.linear(x) * (counts @ counts.T).real.to(x.dtype)).sum()


def gradient_arrives(model: nn.Module, x: Tensor, world_size: int = 2, cluster: str | None = None) -> bool:
    torch._dynamo.reset()
    with fake_world(world_size):
        options = {"lowering": "eager", "cluster": cluster}
        torch.compile(vc.fully_shard(model), backend="vescale", options=options)(x).backward()
    return all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_model_may_multiply_matrices_of_no_floating_point_dtype(dtype: torch.dtype) -> None:
    assert gradient_arrives(Product(dtype), torch.ones(4, 4))


def test_a_model_may_have_a_dtype_without_a_figure() -> None:
    assert gradient_arrives(Product(torch.float16).half(), torch.ones(4, 4, dtype=torch.float16))


def test_ranks_need_not_fill_the_nodes_of_a_preset() -> None:
    assert gradient_arrives(Product(torch.float32), torch.ones(4, 4), world_size=12, cluster="h100")
