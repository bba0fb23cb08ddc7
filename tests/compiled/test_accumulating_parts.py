"""Gradients that accumulate for a part of a model, or of a step."""

import copy

import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

import vescale_compile as vc


class TwoParts(nn.Module):
    """One unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).sum()


def built() -> TwoParts:
    torch.manual_seed(0)
    return TwoParts()


def gradients(module: nn.Module) -> list[Tensor]:
    return [
        param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad for param in module.parameters()
    ]


@on_ranks(2)
def test_zero_grad_of_a_part_forgets_what_accumulated_for_it_alone():
    model, reference = vc.fully_shard(built()), built()
    early, late = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
    with vc.no_sync(model):
        model(early).backward()
    model.second.zero_grad()
    model(late).backward()
    reference(early).backward()
    reference.second.zero_grad()
    reference(late).backward()
    torch.testing.assert_close(gradients(model), gradients(reference))


@on_ranks(2)
def test_no_sync_of_a_part_that_shares_a_unit_with_another_is_refused():
    model = vc.fully_shard(built())
    expected = rf"\[rank {dist.get_rank()}\] no_sync: .* parameter 'first\..*' would accumulate too"
    with pytest.raises(ValueError, match=expected), vc.no_sync(model.second):
        pass
    model.first.requires_grad_(False)
    with vc.no_sync(model.second):  # nothing of the other is trained
        pass


@on_ranks(2)
def test_no_sync_of_a_part_that_is_units_of_its_own_is_for_it_alone():
    model = built()
    vc.fully_shard(model.second)
    vc.fully_shard(model)
    reference = copy.deepcopy(built())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    with vc.no_sync(model.second):
        model(x).backward()
    reference(x).backward()
    torch.testing.assert_close(gradients(model.first), gradients(reference.first))
    assert all(param.grad is None for param in model.second.parameters())


@on_ranks(2)
def test_a_step_before_the_last_gradients_were_reduced_is_refused():
    """As where a pipeline goes backward through its micro-batches in another order than forward."""
    model = vc.fully_shard(built())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 3)
    with vc.no_sync(model):
        early = model(x)
    model(x).backward()
    early.backward()
    with pytest.raises(RuntimeError, match=r"SGD: of parameter '.*' no_sync holds back gradients that came after"):
        optimizer.step()
    model.zero_grad()
    model(x).backward()
    optimizer.step()


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x).sum()


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_an_exception_of_a_backward_that_is_kept_keeps_no_later_gradients(compile):
    torch._dynamo.reset()
    model, call = models.sharded(Either, compile=compile)

    def accumulate() -> None:
        with vc.no_sync(model):
            call(torch.ones(2, 3), 0).backward()
        call(torch.ones(2, 3), 1).backward()

    def refuse(gradient: Tensor) -> None:
        raise FloatingPointError

    hook = model.layers[0].weight.register_hook(refuse)
    with pytest.raises(FloatingPointError) as kept:
        accumulate()
    hook.remove()
    model.zero_grad()
    accumulate()
    assert kept.tb is not None
    assert all(param.grad is not None for param in model.parameters())
