"""Ranks that use different parameters of one unit in a step: gradients are right, and on all ranks or none."""

from collections.abc import Callable
from datetime import timedelta

import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc
from vescale_compile.runtime.agreement import RanksDisagree
from vescale_compile.runtime.unshard import ParamView, _unused
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Branches(nn.Module):
    """One unit, of which a call uses what it is told to."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size, size)) for _ in range(3))

    def forward(self, x, *indices):
        for index in indices:
            x = x @ self.parts[index]
        return x.sum()


class Experts(nn.Module):
    """Sends each row to one of its experts, and leaves out those that get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleDict({f"expert{number}": nn.Linear(8, 8) for number in range(4)})

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts.values()):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out.square().sum()


class Heads(nn.Module):
    """Two losses, each of a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.body(x)
        return self.first(x).sum(), self.second(x).sum()


def fill_free_memory() -> None:
    """With numbers that show where uninitialized memory is read, in the allocator and in slots."""
    for size in range(64, 1024, 32):
        torch.full((size,), 777.0)
    big = vc.fully_shard(nn.Linear(64, 64, bias=False))
    torch.compile(big, backend="vescale", options={"lowering": "eager"})(torch.full((4, 64), 100.0)).sum().backward()


def check(model: nn.Module, reference: nn.Module) -> None:
    """Gradients are those of the unsharded model, averaged, and this rank has them wherever any has."""
    models.average_gradients(reference)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


def average_what_any_rank_has(model: nn.Module) -> None:
    for param in model.parameters():
        has = torch.tensor([param.grad is not None], dtype=torch.uint8)
        dist.all_reduce(has, dist.ReduceOp.MAX)
        if has and param.grad is None:
            param.grad = torch.zeros_like(param)


def check_branches_of_their_own(model: nn.Module, call: nn.Module, reference: nn.Module, x: torch.Tensor) -> None:
    """Each rank takes another branch, as the unsharded model does."""
    for each in (call, reference):
        each(x, 0, 1 + dist.get_rank()).backward()
    average_what_any_rank_has(reference)
    check(model, reference)


@pytest.mark.parametrize("compile", ["eager", None, "inductor"])
@on_ranks(2)
def test_each_rank_may_take_another_branch(compile):
    torch._dynamo.reset()
    model, call = models.sharded(Branches, compile=compile)
    reference = models.build(Branches)
    x = torch.randn(4, 8)
    for index in (1, 2):  # compiles both
        call(x, 0, index).backward()
    for _ in range(2):
        fill_free_memory()
        model.zero_grad()
        reference.zero_grad()
        check_branches_of_their_own(model, call, reference, x)


@on_ranks(2)
def test_graphs_that_are_compiled_for_different_branches_are_refused():
    torch._dynamo.reset()
    _, call = models.sharded(lambda: Branches(9))  # of which no graphs were agreed on
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="without gradients of parameters at") as error:
        call(torch.randn(4, 9), 0, 1 + dist.get_rank())
    assert isinstance(error.value.inner_exception, RanksDisagree)


class Parts(nn.Module):
    """Has parts that are alike, and large enough to be gathered each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(600, 600) for _ in range(3))

    def forward(self, x, name):
        return getattr(self, name)(self.first(x)).sum()


class OneBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])

    def forward(self, *args):
        return self.layers[0](*args)


@on_ranks(2)
def test_ranks_that_use_different_parts_of_a_unit_take_none_for_another():
    group = dist.new_group(timeout=timedelta(seconds=2))
    model, _ = models.sharded(lambda: OneBlock(Parts()), compile=None, mesh=DeviceMesh.from_group(group, "cpu"))
    assert len(buffers_in(model)) == 3
    with pytest.raises(RuntimeError, match=r"(?i)timed out|closed by peer"):
        model(torch.ones(2, 600), ("second", "third")[dist.get_rank()])


@on_ranks(2)
def test_experts_without_tokens_on_a_rank_get_the_gradients_of_the_other():
    model, call = models.sharded(Experts, compile=None)
    reference = models.build(Experts)
    for seed in range(4):
        fill_free_memory()
        model.zero_grad()
        reference.zero_grad()
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * seed + dist.get_rank()))
        call(x).backward()
        reference(x).backward()
        average_what_any_rank_has(reference)
        check(model, reference)


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_so_it_is_where_micro_batches_accumulate(compile):
    torch._dynamo.reset()
    model, call = models.sharded(Branches, compile=compile)
    reference = models.build(Branches)
    x = torch.randn(4, 8)
    for index in (1, 2):  # compiles both, and what ends an accumulation
        with vc.no_sync(model):
            call(x, 0, index).backward()
        call(x, 0).backward()
    model.zero_grad()
    own = 1 + dist.get_rank()
    with vc.no_sync(model):
        call(x, 0, own).backward()
    call(x, 0).backward()
    for indices in ((0, own), (0,)):
        reference(x, *indices).backward()
    average_what_any_rank_has(reference)
    check(model, reference)


@on_ranks(2)
def test_each_backward_through_one_forward_gives_gradients_of_its_own():
    model, _ = models.sharded(Heads, compile=None)
    reference = models.build(Heads)
    x = torch.randn(4, 8)
    for each in (model, reference):
        first, second = each(x)
        first.backward(retain_graph=True)
        fill_free_memory()
        second.backward()
    check(model, reference)


def test_places_without_gradients_between_two_with_them_are_one():
    absent = [ParamView(offset, (8,), True) for offset in (8, 24, 48)]
    assert _unused([0, 40], absent) == [8, 24, 48, 8]


@on_ranks(2)
def test_accumulating_graphs_for_different_branches_are_refused():
    """Else a rank alone would know that graphs differ, and ask the others what they used."""
    torch._dynamo.reset()
    model, call = models.sharded(lambda: Branches(10))
    with vc.no_sync(model), pytest.raises(Exception, match="without gradients of parameters at"):
        call(torch.randn(4, 10), 0, 1 + dist.get_rank())


@on_ranks(2)
def test_ranks_that_run_one_graph_ask_each_other_nothing():
    torch._dynamo.reset()
    model, call = models.sharded(lambda: Branches(11))
    x = torch.randn(4, 11)

    def step() -> None:
        with vc.no_sync(model):
            call(x, 0, 1).backward()
        call(x, 0, 1).backward()
        call(x, 0, 1).backward()

    step()
    assert questions_of(step) == 0


def questions_of(step: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    return sum("gloo:all_reduce" in event.name for event in trace.events())
