"""Which gradients a step refuses before it begins."""

import math

import pytest
import torch
from torch import nn

from vescale_compile.optim.gradients import UnusableGradients, check_gradients


def with_gradients(*grads: torch.Tensor | None) -> list[tuple[str, nn.Parameter]]:
    named = [(f"p{i}", nn.Parameter(torch.zeros(3, dtype=None if g is None else g.dtype))) for i, g in enumerate(grads)]
    for (_, param), grad in zip(named, grads, strict=True):
        param.data = torch.zeros_like(grad) if grad is not None else param.data
        param.grad = grad
    return named


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_found_wherever_they_are(dtype: torch.dtype, value: float) -> None:
    for place in (0, 511, 1000, 1002):  # in vectors of elements, and in what is left over
        grad = torch.randn(1003).to(dtype)
        grad[place] = value
        params = with_gradients(torch.randn(7), grad, None)
        with pytest.raises(UnusableGradients, match=r"Test: the gradient of parameter 'p1' .* NaN or infinite"):
            check_gradients("Test", params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_largest_finite_elements_pass(dtype: torch.dtype) -> None:
    ends = torch.finfo(dtype)
    both = torch.tensor([ends.min, 0.0, ends.max], dtype=dtype)
    check_gradients("Test", with_gradients(both, both[0], torch.empty(0, dtype=dtype), both.expand(4, 3).T))


def test_a_refused_gradient_is_named_with_the_reason_unless_it_is_not_finite() -> None:
    finite, infinite = with_gradients(torch.ones(3), torch.full((3,), math.inf))
    with pytest.raises(UnusableGradients, match=r"the gradient of parameter 'p0' .* is too long"):
        check_gradients("Test", [finite], refused={finite[1]}, reason="is too long")
    with pytest.raises(UnusableGradients, match="NaN or infinite"):
        check_gradients("Test", [infinite], refused={infinite[1]}, reason="is too long")
