"""Which regions of a captured graph are let in."""

import functools

import models
import pytest
import torch
from ranks import fake_world, on_ranks
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.func import functional_call

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Gated(nn.Module):
    """Its cell runs for some batches only. ``how`` says where the cell's parameters are read."""

    def __init__(self, how):
        super().__init__()
        self.how, self.cell = how, nn.Linear(4, 4)

    def forward(self, x):
        read = {}
        if self.how != "inside":
            read = {"weight": self.cell.weight.clone(), "bias": self.cell.bias.clone()}

        def run(x):
            if self.how == "before":
                return nn.functional.linear(x, read["weight"], read["bias"])
            return functional_call(self.cell, read, (x,))

        return torch.cond(x.sum() > 0, run, torch.sin, (x,))


class Repeated(nn.Linear):
    """Runs on what it has computed as often as the batch says."""

    def forward(self, x):
        weight, bias = self.weight.clone(), self.bias.clone()
        times, zero = (x.sum() > 0).long() + 2, torch.zeros((), dtype=torch.int64)

        def run(done, x):
            return done + 1, nn.functional.linear(x, weight, bias).tanh()

        return x + while_loop(lambda done, x: done < times, run, (zero, x))[1]


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
        with pytest.raises(
            Exception, match=r"\[rank 0\] torch.compiler.nested_compile_region \(or .*\) is not supported: leave"
        ):
            call(torch.ones(2, 4))


def test_what_an_operator_is_given_to_run_reads_no_sharded_parameter():
    torch._dynamo.reset()
    with fake_world(2):
        call = torch.compile(vc.fully_shard(nn.Sequential(Gated("inside"))), backend="vescale")
        with pytest.raises(Exception, match=r"\[rank 0\] .*\(4, 4\) is read in .* 'cond' is given to run\. Read it"):
            call(torch.ones(3, 4))


@on_ranks(2)
@pytest.mark.parametrize("how", ["before", "functional", "repeated"])
def test_it_takes_copies_of_parameters_that_were_read_before(how):
    torch._dynamo.reset()
    build = functools.partial(Repeated, 4, 4) if how == "repeated" else functools.partial(Gated, how)
    reference, model = (nn.Sequential(build(), build()) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    call = torch.compile(vc.fully_shard(model), backend="vescale", options={"lowering": "eager"})
    x = torch.arange(12.0).view(3, 4) - 5
    call(x).square().sum().backward()
    reference(x).square().sum().backward()
    models.assert_gradients_of(model, reference, atol=1e-6)
