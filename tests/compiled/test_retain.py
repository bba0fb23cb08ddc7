"""Selective resharding: within a memory budget, what the backward need not gather again."""

import functools
import re
from typing import NamedTuple

import models
import pytest
import torch
from kernels import allocated_by
from ranks import fake_world, on_ranks
from torch._dynamo.exc import BackendCompilerFailed

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.passes.context import GraphError, Part
from vescale_compile.passes.summary import Kind
from vescale_compile.report import GraphReport

pytestmark = pytest.mark.slow  # left out of `make test-fast`

AMPLE = 10**9
LAYERS = 4
UNITS = LAYERS + 1


def some_layers() -> torch.nn.Module:
    return models.Uneven(LAYERS)


def sharded(reshard: bool = True) -> torch.nn.Module:
    torch._dynamo.reset()
    return vc.fully_shard(models.build(some_layers), reshard_after_forward=reshard)


@functools.cache
def explained(budget: int | None, reshard: bool = True):
    options = {"lowering": "eager", "cluster": models.SLOW_WIRE, "memory_budget": budget}
    (graph,) = vc.explain(sharded(reshard=reshard), *models.batches(1, 11)[0], options=options).graphs
    return graph


def gathers(graph, part: Part) -> int:
    return sum(entry.kind is Kind.ALL_GATHER for entry in graph.parts[part].entries)


@functools.cache
def least_budget() -> int:
    """What a step needs, as it says where it gets less."""
    with pytest.raises(GraphError) as refused:
        explained(1)
    needed = re.search(r"needs ([\d,]+)", str(refused.value))
    assert needed is not None
    return int(needed[1].replace(",", ""))


@pytest.fixture(scope="module")
def between() -> int:
    """A budget with room for some of the units."""
    with fake_world(2):
        return (least_budget() + explained(None, reshard=False).peak_bytes) // 2


def test_the_budget_that_a_refusal_asks_for_is_enough_and_little_less_is_not():
    with fake_world(2):
        least = least_budget()
        assert explained(least).peak_bytes <= least
        with pytest.raises(GraphError, match=f"needs {least:,}"):
            explained(int(0.99 * least))


def test_the_backward_gathers_less_the_larger_the_budget_which_is_never_exceeded():
    with fake_world(2):
        least, most = least_budget(), explained(None, reshard=False).peak_bytes
        budgets = [least + (most - least) * eighth // 8 for eighth in range(10)]
        graphs = [explained(budget) for budget in budgets]
    again = [gathers(graph, Part.BACKWARD) for graph in graphs]
    assert again == sorted(again, reverse=True)
    assert again[0] == UNITS and again[-1] == 0 and len(set(again)) > 4
    assert all(gathers(graph, Part.FORWARD) == UNITS for graph in graphs)
    assert all(graph.peak_bytes <= budget for graph, budget in zip(graphs, budgets, strict=True))


def test_an_ample_budget_gives_what_units_have_that_are_never_resharded():
    with fake_world(2):
        found, kept = explained(AMPLE), explained(AMPLE, reshard=False)
    for part in found.parts:
        assert found.parts[part].entries == kept.parts[part].entries
        assert found.parts[part].prediction.seconds == pytest.approx(kept.parts[part].prediction.seconds)


def test_without_a_budget_the_unit_that_the_backward_reads_first_is_kept_and_no_other():
    with fake_world(2):
        graph = explained(None)
    after = {unit.name: unit.after_forward for unit in graph.units}
    assert after.pop("(root)") == "kept: the backward reads it first"
    assert set(after.values()) == {"resharded"}
    assert gathers(graph, Part.BACKWARD) == LAYERS


class WithItsHead(models.Uneven):
    """Returns a parameter beside the loss."""

    def forward(self, tokens, labels):
        return super().forward(tokens, labels), self.head.weight


def test_a_parameter_that_the_program_returns_is_not_brought_again_for_a_budget():
    torch._dynamo.reset()
    with fake_world(2):
        model = vc.fully_shard(models.build(WithItsHead))
        options = {"lowering": "eager", "memory_budget": AMPLE}
        (graph,) = vc.explain(model, *models.batches(1, 11)[0], options=options).graphs
    assert gathers(graph, Part.BACKWARD) <= 1  # of the unit that is returned, if any


def test_the_report_names_the_units_that_are_kept(between):
    with fake_world(2):
        graph = explained(between)
    kept = [unit.name for unit in graph.units if unit.after_forward == "kept: memory_budget allows it"]
    assert 0 < len(kept) == UNITS - gathers(graph, Part.BACKWARD) < UNITS
    assert str(graph).count("kept: memory_budget allows it") == len(kept)


@pytest.mark.parametrize("budget", [0, 0.1])
def test_units_that_are_never_resharded_are_kept_where_activations_are_computed_again(budget: float):
    options = {"lowering": "eager", "cluster": models.SLOW_WIRE}
    with fake_world(2), torch._functorch.config.patch(activation_memory_budget=budget):
        (graph,) = vc.explain(sharded(reshard=False), *models.batches(1, 11)[0], options=options).graphs
    assert gathers(graph, Part.FORWARD) == UNITS
    assert gathers(graph, Part.BACKWARD) == 0


class Trained(NamedTuple):
    """Four steps of training within a budget, and one in which what it allocates is looked at."""

    graph: GraphReport
    parameters: dict[str, torch.Tensor]
    losses: list[float]
    most: int


@functools.cache
def trained(budget: int) -> Trained:
    graphs: list[GraphReport] = []
    options = {"lowering": "eager", "cluster": models.SLOW_WIRE, "memory_budget": budget}
    model, data = sharded(), models.batches(4, 11)
    call = torch.compile(model, backend=functools.partial(vescale, options=options, on_compiled=graphs.append))
    losses = models.train(call, model.parameters(), data)
    parameters = models.whole(model)
    most = allocated_by(lambda: call(*data[0]).backward())
    (graph,) = graphs
    assert 0 < gathers(graph, Part.BACKWARD) < LAYERS  # more is kept than without a budget
    return Trained(graph, parameters, losses, most)


@on_ranks(2)
def test_what_is_kept_changes_no_number(between):
    found = trained(between)
    unsharded, reference = models.train_unsharded(some_layers, models.batches(4, 11))
    assert found.losses == reference
    assert models.largest_difference(found.parameters, unsharded) == 0.0


@on_ranks(2)
def test_a_real_step_takes_what_the_budget_allows(between):
    found = trained(between)
    graph, most = found.graph, found.most
    assert max(part.peak.nbytes for part in graph.parts.values()) == pytest.approx(most, rel=0.1)
    assert graph.shard_bytes + graph.slot_bytes + most <= 1.1 * between


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


SMALL, LARGE = 4, 2048
SCARCE = {"lowering": "eager", "memory_budget": "63MB"}  # has room for all units of a small batch, for none of a large


def wide() -> torch.nn.Module:
    torch._dynamo.reset()
    return vc.fully_shard(Wide())


def gathered_again(model: torch.nn.Module, rows: int) -> int:
    (graph,) = vc.explain(model, torch.randn(rows, 512), options=SCARCE).graphs
    return gathers(graph, Part.BACKWARD)


def train_once(model: torch.nn.Module, rows: int) -> None:
    torch.compile(model, backend="vescale", options=SCARCE)(torch.randn(rows, 512)).backward()


def test_what_is_kept_for_a_batch_that_is_only_explained_need_not_be_when_training():
    with fake_world(1):
        model = wide()
        few = gathered_again(model, SMALL)
        train_once(model, LARGE)
        assert gathered_again(model, LARGE) > few


def test_explaining_shows_what_was_decided_for_training():
    with fake_world(1):
        model = wide()
        train_once(model, LARGE)
        assert gathered_again(model, SMALL) == gathered_again(model, LARGE)


def test_a_batch_that_what_a_smaller_one_keeps_leaves_no_room_is_refused_with_their_names():
    with fake_world(1):
        model = wide()
        train_once(model, SMALL)
        with pytest.raises(BackendCompilerFailed) as refused:
            train_once(model, LARGE)
    (kept,) = re.findall(r"has decided for all that (.+) are kept for the backward", str(refused.value.inner_exception))
    assert kept.startswith("layers.")
