"""The four fields of MixedPrecisionPolicy."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import vescale_compile as vc
from vescale_compile.casting import cast_tensors
from vescale_compile.passes.context import Part
from vescale_compile.passes.summary import Kind

pytestmark = pytest.mark.slow  # left out of `make test-fast`

BF16, FP32 = torch.bfloat16, torch.float32


class Probe(nn.Module):
    """Reports the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.seen = (x.dtype, self.linear.weight.dtype)
        return self.linear(x.to(self.linear.weight.dtype))


class Outer(nn.Module):
    """Has parameters in its layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Probe() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Tower(nn.Module):
    """Says of which dtype its parameters are, which are those of its parts, and casts to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)

    @property
    def dtype(self):
        return next(self.parameters()).dtype

    def forward(self, pixels):
        self.seen = self.dtype
        return self.stem(pixels.to(self.dtype))


class WithTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, pixels):
        return self.layers[0](self.tower(pixels))


def probe(policy: vc.MixedPrecisionPolicy, compile: str | None):
    torch._dynamo.reset()
    model, call = models.sharded(Probe, compile=compile, mp_policy=policy)
    out = call(torch.ones(2, 8))
    out.sum().backward()
    return model, out


@on_ranks(2)
def test_param_dtype_is_that_of_parameters_in_forward_and_masters_stay_fp32():
    for compile in (None, "eager"):
        model, out = probe(vc.MixedPrecisionPolicy(param_dtype=BF16), compile)
        assert model.seen == (BF16, BF16)
        assert out.dtype == BF16
        assert {p.dtype for p in model.parameters()} == {FP32}
        assert {p.grad.dtype for p in model.parameters()} == {FP32}


@pytest.mark.parametrize("compile", [None, "eager"])
@on_ranks(2)
def test_a_module_that_says_its_dtype_says_that_of_parameters_in_forward(compile):
    torch._dynamo.reset()
    model, call = models.sharded(WithTower, compile=compile, mp_policy=vc.MixedPrecisionPolicy(param_dtype=BF16))
    assert call(torch.ones(2, 8, dtype=torch.uint8)).dtype == BF16
    assert (model.tower.seen, model.tower.dtype) == (BF16, FP32)


@on_ranks(2)
def test_cast_forward_inputs_false_leaves_inputs_alone():
    for compile in (None, "eager"):
        model, _ = probe(vc.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False), compile)
        assert model.seen == (FP32, BF16)


@on_ranks(2)
def test_output_dtype_is_that_of_the_outputs():
    for compile in (None, "eager"):
        _, out = probe(vc.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32), compile)
        assert out.dtype == FP32


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    mask: torch.Tensor | None = dataclasses.field(default=None, init=False)

    def __getitem__(self, name: str) -> torch.Tensor:
        return getattr(self, name)


class Named(dict):
    pass


class Row(list):
    def __getitem__(self, name):
        return super().__getitem__(0 if name == "x" else name)


class Scale(nn.Module):
    """Takes a container of ``x``, and returns another such."""

    def __init__(self, contain: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.contain = contain

    def forward(self, batch):
        self.seen = batch["x"].dtype
        return self.contain(self.linear(batch["x"]))


def named(x):
    return Named(x=x)


def ordered(x):
    return OrderedDict(x=x)


def row(x):
    return Row([x])


@pytest.mark.parametrize("contain", [Batch, named, ordered, row])
@pytest.mark.parametrize("compile", [None, "eager"])
@on_ranks(2)
def test_inputs_and_outputs_are_cast_in_containers_of_the_program_s(contain, compile):
    torch._dynamo.reset()
    model = vc.fully_shard(Scale(contain), mp_policy=vc.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32))
    if compile is not None:
        model.compile(backend="vescale", options={"lowering": compile}, fullgraph=True)
    given = contain(torch.ones(2, 8))
    out = model(given)
    assert (model.seen, out["x"].dtype, given["x"].dtype) == (BF16, FP32, FP32)
    assert type(out) is type(given)


@pytest.mark.parametrize("contained", [torch.ones(2, dtype=torch.int64), ["a", {"b": (1, 2)}]], ids=["ids", "names"])
@pytest.mark.parametrize("contain", [Batch, named, row])
def test_what_has_nothing_to_cast_stays_what_it_is(contain, contained):
    given = contain(contained)
    assert cast_tensors((given, torch.ones(1)), BF16)[0] is given


def test_arguments_of_which_none_is_cast_stay_what_they_are():
    given = ([1], torch.ones(2, dtype=torch.int64))
    assert cast_tensors(given, BF16) is given


def test_what_a_dataclass_has_got_since_it_was_made_is_cast_too():
    batch = Batch(torch.ones(2))
    batch.mask = torch.ones(2)
    assert cast_tensors(batch, BF16).mask.dtype == BF16


@on_ranks(2)
def test_the_shard_is_cast_once_before_the_gather_and_reduced_in_reduce_dtype():
    torch._dynamo.reset()
    policy = vc.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = vc.fully_shard(models.build(models.Uneven), mp_policy=policy)
    (graph,) = vc.explain(model, *models.batches(1, 11)[0], options={"lowering": "eager"}).graphs
    forward, backward = graph.parts[Part.FORWARD], graph.parts[Part.BACKWARD]
    assert [entry.nbytes for entry in forward.entries if entry.kind is Kind.CAST] == [
        unit.shard_bytes // 2 for unit in graph.units
    ]
    assert {slot.dtype for slot in forward.slots} == {str(BF16)}
    assert forward.nbytes(Kind.ALL_GATHER) == sum(unit.shard_bytes for unit in graph.units)  # half of two shards
    assert backward.nbytes(Kind.REDUCE_SCATTER) == 2 * sum(unit.shard_bytes for unit in graph.units)


@on_ranks(2)
def test_bf16_training_equals_casting_by_hand():
    """The reference casts the fp32 parameters, averages gradients in fp32, and steps in fp32."""
    policy = vc.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    data = models.batches(3, 11)
    model, call = models.sharded(models.Uneven, mp_policy=policy)
    losses = models.train(call, model.parameters(), data)

    master = models.build(models.Uneven)
    optimizer = models.sgd(master.parameters())
    working = models.build(models.Uneven).to(BF16)
    compiled = torch.compile(working, backend="aot_eager")
    expected = []
    for tokens, labels in data:
        with torch.no_grad():
            for ours, theirs in zip(working.parameters(), master.parameters(), strict=True):
                ours.copy_(theirs)
        loss = compiled(tokens, labels)
        loss.backward()
        for ours, theirs in zip(working.parameters(), master.parameters(), strict=True):
            theirs.grad, ours.grad = ours.grad.float(), None
            dist.all_reduce(theirs.grad)
            theirs.grad /= 2
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected
    assert models.largest_difference(model, master) == 0.0


@on_ranks(2)
def test_so_it_is_where_the_root_has_no_parameters_of_its_own():
    model = vc.fully_shard(Outer(), mp_policy=vc.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32))
    assert model(torch.ones(2, 8)).dtype == FP32
    assert {layer.seen[0] for layer in model.layers} == {BF16}
