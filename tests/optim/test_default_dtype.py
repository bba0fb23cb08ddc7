"""Programs may set another default dtype: what optimizers count and look up does not change with it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adamw8bit_cases import adamw8bit, assert_same_bits, contents
from torch import nn

import vescale_compile as vc
from vescale_compile.optim.blockwise import codebook

OPTIMIZERS = [
    lambda params: vc.optim.AdamW8bit(params, compile=False),
    vc.optim.Muon,
    vc.optim.Shampoo,
]


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def another_default(request: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    codebook.cache_clear()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        codebook.cache_clear()


@pytest.mark.parametrize("build", OPTIMIZERS, ids=["AdamW8bit", "Muon", "Shampoo"])
def test_steps_are_counted_beyond_256(build: Callable[..., torch.optim.Optimizer], another_default: None) -> None:
    module = nn.Linear(8, 8, dtype=torch.float32)
    optimizer = build(list(module.named_parameters()))
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert counts and all(count.dtype == torch.float32 for count in counts)
    for count in counts:
        count.fill_(256)
    optimizer.step()
    assert {count.item() for count in counts} == {257}


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_of_codes_is_the_same(signed: bool, another_default: None) -> None:
    book = codebook(signed, torch.device("cpu"))
    torch.set_default_dtype(torch.float32)
    codebook.cache_clear()
    expected = codebook(signed, torch.device("cpu"))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(book, expected, strict=True))


def test_codes_scales_and_weights_are_the_same(another_default: None) -> None:
    def stepped() -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(numel, dtype=torch.float32)) for numel in (5000, 64)]
        optimizer = adamw8bit(params)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, dtype=torch.float32)
            optimizer.step()
        return contents(params, optimizer)

    found = stepped()
    torch.set_default_dtype(torch.float32)
    codebook.cache_clear()
    assert_same_bits(found, stepped())
