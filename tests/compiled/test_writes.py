"""A write to a parameter in a forward is refused, in every way in which Python can say it."""

import copy
import re

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`


# Of a library that says no more of its operator than what it computes.
LIBRARY = torch.library.Library("vescale_test_writes", "DEF")
LIBRARY.define("double(Tensor(a!) x) -> ()")
LIBRARY.impl("double", lambda x: x.mul_(2), "CPU")
LIBRARY.impl("double", lambda x: None, "Meta")
LIBRARY.define("scaled(Tensor x, Tensor by) -> Tensor")
LIBRARY.define("scaled.in_place(Tensor x, Tensor(a!) by, int times) -> Tensor")
LIBRARY.impl("scaled", torch.mul, "CompositeExplicitAutograd")


class Doubles(torch.autograd.Function):
    """Writes to what it is given."""

    @staticmethod
    def forward(ctx, w: Tensor) -> Tensor:
        return w.data.mul_(2).clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class Writes(nn.Module):
    """Writes to a parameter inside forward, in one of the ways that Python offers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.embed = nn.Embedding(4, 4, max_norm=0.5)
        self.how = "nothing"

    @torch.no_grad()
    def write(self):
        match self.how:
            case "method":
                self.w.mul_(2)
            case "operator":
                w = self.w
                w += 1
            case "view":
                self.w[0].zero_()
            case "item":
                self.w[0] = 1.0
            case "detach":
                self.w.detach().mul_(2)
            case "data":
                self.w.data.mul_(2)
            case "other data":
                self.w.data = self.w.data * 2
            case "out":
                torch.add(self.w, 1, out=self.w)
            case "foreach":
                torch._foreach_mul_([self.w], 2.0)
            case "max_norm":
                self.embed(torch.arange(4))
            case "library":
                torch.ops.vescale_test_writes.double(self.w)

    def forward(self, x):
        if self.how.startswith("checkpointed "):
            self.how = self.how.removeprefix("checkpointed ")
            return checkpoint(self.product, x, use_reentrant=False)
        return self.product(x)

    def product(self, x):
        if self.how == "function":
            Doubles.apply(self.w)
        self.write()
        return (x @ self.w).sum() + self.w.detach().clone().mul_(2).sum()


WAYS = ["method", "operator", "view", "item", "detach", "data", "out", "foreach", "max_norm"]
REGIONS = ["function", "checkpointed method", "checkpointed data", "checkpointed foreach"]


@pytest.mark.parametrize("how", [*WAYS, "library", *REGIONS])
@on_ranks(2)
def test_writing_to_a_parameter_in_a_compiled_forward_is_refused(how):
    torch._dynamo.reset()
    model, call = models.sharded(Writes)
    model.how = how
    with pytest.raises(Exception, match="written to inside forward") as caught:
        call(torch.ones(4, 4))
    assert f"rank {dist.get_rank()}" in str(caught.value)
    assert re.search(r"it is written by line \d+ of \S+test_writes\.py", str(caught.value))


@on_ranks(2)
def test_so_it_is_where_forwards_before_it_wrote_nothing():
    torch._dynamo.reset()
    model, call = models.sharded(Writes)
    call(torch.ones(4, 4)).backward()
    model.how = "method"
    with pytest.raises(Exception, match="written to inside forward"):
        call(torch.ones(4, 4))


class Scales(nn.Module):
    """By an operator of a library, which may also write to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return torch.ops.vescale_test_writes.scaled(x, self.w.detach()).sum() + self.w.sum()


@on_ranks(2)
def test_an_operator_of_which_another_overload_writes_is_let_in():
    torch._dynamo.reset()
    _, call = models.sharded(Scales)
    assert call(torch.ones(4, 4)).item() == 32.0


@pytest.mark.parametrize("how", ["method", "detach", "data", "row"])
def test_what_is_written_to_shards_in_an_uncompiled_forward_is_read_after_it(how):
    class Doubled(nn.Linear):
        def forward(self):
            before = self.weight.sum()
            with torch.no_grad():
                (shard,) = self.parameters()
                match how:
                    case "method":
                        shard.mul_(2)
                    case "detach":
                        shard.detach().mul_(2)
                    case "data":
                        shard.data.mul_(2)
                    case "row":
                        shard[0].mul_(2)
            return before, self.weight.sum()

    with fake_world(1):
        plain = Doubled(4, 1, bias=False)
        assert vc.fully_shard(copy.deepcopy(plain))() == plain()


@pytest.mark.parametrize("how", ["other data", *(way for way in WAYS if way not in ("data", "max_norm"))])
@on_ranks(2)
def test_writing_to_a_parameter_in_an_eager_forward_is_refused(how):
    model, call = models.sharded(Writes, compile=None)
    model.how = how
    with pytest.raises(RuntimeError, match="written to inside forward"):
        call(torch.ones(4, 4))


@on_ranks(2)
def test_so_is_an_embedding_that_renormalizes_its_rows():
    model = vc.fully_shard(nn.Embedding(4, 4, max_norm=0.5))
    with pytest.raises(RuntimeError, match=r"rank \d\] .*written to inside forward"):
        model(torch.arange(4))


class WritesToAnother(nn.Module):
    """Moves the weights of a module that is a unit of its own and does not run, as a target network's are."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(4, 4)
        self.target = vc.fully_shard(nn.Linear(4, 4))

    def forward(self, x):
        with torch.no_grad():
            self.target.weight.lerp_(self.online.weight, 0.5)
        return self.online(x).sum()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@on_ranks(2)
def test_writing_to_a_parameter_of_another_unit_in_an_eager_forward_is_refused(mode):
    model = vc.fully_shard(WritesToAnother())
    with mode(), pytest.raises(RuntimeError, match="written to inside forward"):
        model(torch.ones(4, 4))


@on_ranks(2)
def test_writing_to_a_parameter_in_inference_mode_is_refused():
    model, call = models.sharded(Writes, compile=None)
    model.how = "method"
    with torch.inference_mode(), pytest.raises(RuntimeError, match="written to inside forward"):
        call(torch.ones(4, 4))
