"""Gradients are written where they are reduced: what copies nothing, what is copied, and why."""

import dataclasses
import functools

import handmade
import models
import pytest
import torch
import torch.nn.functional as F
from ranks import fake_world, on_ranks
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import vescale_compile as vc
from vescale_compile import backend
from vescale_compile.passes.context import Lowering, Part
from vescale_compile.passes.sink import sink
from vescale_compile.passes.summary import Direction, Entry, Kind
from vescale_compile.runtime import ops
from vescale_compile.runtime.unshard import ParamView
from vescale_compile.torch_internals.aot import run_boxed

aten = torch.ops.aten
LOWERINGS = ("eager", "inductor")
STORED_FIRST = " is stored before it is placed"


@pytest.fixture
def without_code_generation(monkeypatch):
    """Runs the graphs that Inductor would lower, operator by operator."""
    monkeypatch.setattr(backend, "inductor_compile_inner", lambda gm, inputs, **kwargs: run_boxed(gm))


class Loss(nn.Module):
    """``forward(x)`` returns a loss of what ``compute`` makes of the parameters and ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x).square().sum()


class Tied(Loss):
    """A table used to look up and to score, as of language models that tie embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))

    def compute(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table) @ self.table.t()


class LookedUp(Loss):
    """A table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))

    def compute(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table)


class Twice(Loss):
    """One matrix in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight


class Experts(Loss):
    """A stack of matrices in one batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def compute(self, x: Tensor) -> Tensor:
        return x.expand(4, -1, -1) @ self.weight


class Affine(Loss):
    """A scale and a shift, whose gradients are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def compute(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Convolution(Loss):
    """Its gradient comes out of an operator with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(8, 8, 3, bias=False)

    def compute(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Shared(Loss):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def compute(self, x: Tensor) -> Tensor:
        return x * (self.first + self.second)


class Split(Loss):
    """A matrix that the program splits, as attention to another sequence does with that of its three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 8))

    def compute(self, x: Tensor) -> Tensor:
        first, second = self.weight.split([8, 16])
        return torch.tanh(x @ first.t()) @ second.view(8, 16)


class Sliced(Loss):
    """A matrix of which the program uses some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))

    def compute(self, x: Tensor) -> Tensor:
        return x @ self.weight[:8].t()


class Diagonal(Loss):
    """A matrix of whose diagonal alone there is a gradient: Inductor writes it to a copy of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def compute(self, x: Tensor) -> Tensor:
        return x * self.weight.diagonal()


class Summed(Loss):
    """A matrix whose rows are added up one after another, and its gradient's from behind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def compute(self, x: Tensor) -> Tensor:
        return x * self.weight.cumsum(0)


class Correction(Loss):
    """A matrix used alone and with another added: the second's gradient is a summand of the first's."""

    def __init__(self, base_first: bool = True) -> None:
        super().__init__()
        for name in ("base", "delta") if base_first else ("delta", "base"):
            setattr(self, name, nn.Parameter(torch.randn(8, 8)))

    def compute(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base) + F.linear(x.cos(), self.base + self.delta)


class Together(nn.Module):
    """Several such models, each a unit of its own, for one compilation: the sum of their losses."""

    def __init__(self, *builds: type[Loss]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build() for build in builds)

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer, x in zip(self.layers, inputs, strict=True)]).sum()


def numbers() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def inputs_of(build: type[Loss]) -> Tensor:
    inputs = {Tied: lambda: torch.arange(6), Convolution: lambda: numbers().reshape(1, 8, 4)}
    return inputs.get(build, numbers)()


def report(build, *inputs: Tensor, lowering: str, **shard_options):
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(build), **shard_options)
    (graph,) = vc.explain(model, *inputs, options={"lowering": lowering}).graphs
    return graph


def moved(graph) -> list[Entry]:
    kinds = (Kind.COPY, Kind.CAST, Kind.CONCATENATION)
    return [entry for part in graph.parts.values() for entry in part.entries if entry.kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", ["one_layer_llama", "hf_llama_of_one_layer"])
def test_a_language_model_copies_nothing(name, lowering, without_code_generation):
    with fake_world(2):
        graph = report(getattr(models, name), *models.batches(1, 64)[0], lowering=lowering)
    assert moved(graph) == []


@pytest.mark.slow
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_mixture_of_experts_copies_what_its_own_operators_compute(lowering, without_code_generation):
    with fake_world(2):
        graph = report(models.hf_gpt_oss_of_one_layer, *models.batches(1, 64)[0], lowering=lowering)
    assert {(entry.kind, entry.why.partition(",")[0]) for entry in moved(graph)} == {
        (Kind.COPY, "computed by transformers.grouped_mm_fallback_backward.default"),
        (Kind.CONCATENATION, "by the program itself"),  # attention's sinks, behind its scores
    }


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_each_of_these_copies_nothing(lowering, without_code_generation):
    builds = (Tied, Twice, Experts, Affine, Split)
    with fake_world(2):
        graph = report(functools.partial(Together, *builds), *map(inputs_of, builds), lowering=lowering)
    assert len(graph.units) == len(builds)
    assert moved(graph) == []


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("build", [Convolution, Shared])
def test_what_can_not_be_written_in_place_is_copied_once_and_says_why(build, lowering, without_code_generation):
    reasons = {Convolution: "convolution_backward", Shared: "read elsewhere too"}
    with fake_world(2):
        copies = moved(report(build, inputs_of(build), lowering=lowering))
        parameters = list(build().parameters())
    assert [entry.kind for entry in copies] == [Kind.COPY] * len(parameters)
    assert sum(entry.nbytes for entry in copies) == sum(param.nbytes for param in parameters)
    assert all(reasons[build] in entry.why for entry in copies)


@pytest.mark.parametrize(("build", "numel"), [(Sliced, 16 * 8), (Summed, 4 * 8)])
def test_a_gradient_that_is_only_moved_to_its_place_is_a_copy(build, numel, without_code_generation):
    with fake_world(2):
        copies = moved(report(build, numbers(), lowering="inductor"))
    assert [(entry.kind, entry.nbytes) for entry in copies] == [(Kind.COPY, numel * 4)]
    assert copies[0].why.startswith("moved by ")


def test_a_gradient_that_generated_code_writes_to_a_part_of_is_copied_once(without_code_generation):
    with fake_world(2):
        (copy,) = moved(report(Diagonal, numbers(), lowering="inductor"))
    assert (copy.kind, copy.nbytes) == (Kind.COPY, 8 * 8 * 4)
    assert copy.why == f"aten.diagonal_scatter.default{STORED_FIRST}"


@pytest.mark.parametrize("base_first", [True, False])
def test_a_summand_of_a_gradient_that_is_one_itself_is_copied(base_first, without_code_generation):
    with fake_world(2):
        copies = moved(report(functools.partial(Correction, base_first), numbers(), lowering="inductor"))
    assert {(entry.nbytes, entry.why) for entry in copies} == {(8 * 8 * 4, "read elsewhere too")}


def test_a_product_whose_place_is_not_aligned_is_copied(without_code_generation):
    with fake_world(2):
        copies = moved(report(models.Block, torch.randn(3, 13), lowering="eager"))
    assert {(entry.nbytes, entry.why) for entry in copies} == {(7 * 13 * 4, "its place is not aligned to 16 bytes")}


@pytest.mark.slow
def test_mixed_precision_casts_shards_and_gradients_and_copies_nothing(without_code_generation):
    policy = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with fake_world(2):
        graph = report(models.one_layer_llama, *models.batches(1, 64)[0], lowering="inductor", mp_policy=policy)
    shards = sum(unit.shard_bytes for unit in graph.units)
    again = sum(unit.shard_bytes for unit in graph.units if unit.after_forward == "resharded")
    casts = {
        part: sum(
            entry.nbytes
            for entry in summary.entries
            if entry.kind is Kind.CAST and not entry.why.endswith(STORED_FIRST)
        )
        for part, summary in graph.parts.items()
    }
    assert casts[Part.FORWARD] == shards // 2  # each into its place in the bf16 buffer
    assert casts[Part.BACKWARD] == again // 2 + shards  # and the reduced gradients to fp32
    assert {entry.kind for entry in moved(graph)} == {Kind.CAST}


@pytest.mark.parametrize("rounds", [False, True])
def test_sums_in_bf16_are_stored_in_fp32_where_they_are_reduced(rounds, without_code_generation):
    """Unless Inductor was told to round them to bf16 first, as operators do."""
    policy = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_world(2), torch._inductor.config.patch(emulate_precision_casts=rounds):
        graph = report(Affine, numbers(), lowering="inductor", mp_policy=policy)
    casts = [(entry.kind, entry.nbytes) for entry in moved(graph) if entry.direction is Direction.REDUCE]
    assert casts == ([(Kind.CAST, 8 * 4)] * 2 if rounds else [])


@pytest.mark.parametrize("rounds", [False, True])
def test_rows_looked_up_in_bf16_are_added_up_in_fp32_where_they_are_reduced(
    rounds, without_code_generation, tmp_path, monkeypatch
):
    """Unless Inductor was told to round their sum to bf16 first, as operators do."""
    monkeypatch.setenv("VESCALE_DUMP", str(tmp_path))
    policy = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_world(2), torch._inductor.config.patch(emulate_precision_casts=rounds):
        graph = report(LookedUp, torch.arange(6), lowering="inductor", mp_policy=policy)
    assert [entry for entry in moved(graph) if entry.direction is Direction.REDUCE] == []
    (final,) = tmp_path.glob("**/*backward-after-verify.py")
    assert ("index_put_." in final.read_text()) is not rounds


def sunk_product(*, float32_products: bool) -> list[object]:
    """What computes a gradient of 8 x 8 from products in bf16, reduced in fp32: the operators of its graph."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(aten.mm.default, (a, b))
    packed = graph.call_function(ops.pack, ([product], [0], [0], [], 64, torch.float32, 0))
    graph.output((packed,))
    with FakeTensorMode():
        for node in (a, b, product):
            node.meta["val"] = torch.empty(8, 8, dtype=torch.bfloat16)
        packed.meta["val"] = torch.empty(64)
    given = dataclasses.replace(handmade.context(Part.BACKWARD), lowering=Lowering.INDUCTOR)
    unit = dataclasses.replace(given.units[0], views=(ParamView(0, (8, 8), True),))
    sink(fx.GraphModule({}, graph), dataclasses.replace(given, float32_products=float32_products, units=(unit,)))
    return [node.target for node in graph.nodes]


def test_products_in_bf16_write_fp32_where_the_library_gives_it():
    found = sunk_product(float32_products=True)
    assert ops.matmul_into in found and aten.copy_.default not in found


def test_products_in_bf16_are_cast_where_the_library_does_not():
    found = sunk_product(float32_products=False)
    assert aten.copy_.default in found and ops.matmul_into not in found


def test_products_in_bf16_are_cast_if_inductor_is_to_round_as_operators_do():
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert aten.copy_.default in sunk_product(float32_products=True)


def test_a_weight_used_twice_accumulates_in_its_place(without_code_generation, tmp_path, monkeypatch):
    monkeypatch.setenv("VESCALE_DUMP", str(tmp_path))
    with fake_world(2):
        report(Twice, numbers(), lowering="inductor")
    (final,) = tmp_path.glob("**/*backward-after-verify.py")
    products = [line for line in final.read_text().splitlines() if "matmul_into" in line]
    assert len(products) == 2
    assert [", False)" in line for line in products] == [True, False]


@pytest.mark.parametrize("lowering", LOWERINGS)
@on_ranks(2)
def test_gradients_are_those_of_the_unsharded_model(lowering):
    builds = (Tied, Twice, Experts, Affine, Convolution, Shared, Split, Sliced, Diagonal, Correction)
    build, inputs = functools.partial(Together, *builds), [*map(inputs_of, builds)]
    torch._dynamo.reset()
    model, reference = vc.fully_shard(models.build(build)), models.build(build)
    original = backend.inductor_compile_inner
    backend.inductor_compile_inner = lambda gm, inputs, **kwargs: run_boxed(gm)
    try:
        torch.compile(model, backend="vescale", options={"lowering": lowering})(*inputs).backward()
    finally:
        backend.inductor_compile_inner = original
    reference(*inputs).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
