"""A graph that raises between a launch and its wait, on all ranks alike: the next one is as if it had not been."""

import models
import pytest
import torch
from ranks import on_ranks


@pytest.mark.slow
@on_ranks(2)
def test_the_step_after_a_failed_forward_is_what_it_would_have_been():
    torch._dynamo.reset()
    good, bad = models.batches(1, 11)[0], (torch.full((2, 3), 99), torch.zeros(2, 3, dtype=torch.int64))
    model, call = models.sharded(models.Uneven)
    usual = call(*good)
    usual.backward()
    gradients = [param.grad.full_tensor() for param in model.parameters()]
    model.zero_grad()
    with pytest.raises(IndexError):
        call(*bad)
    again = call(*good)
    again.backward()
    assert again.item() == usual.item()
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(param.grad.full_tensor(), gradient)
