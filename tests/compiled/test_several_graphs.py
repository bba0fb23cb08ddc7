"""Models of several graphs: what a step takes beside the one that is compiled is in its plan, and in its budget."""

import copy
import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import models
import pytest
import torch
from kernels import allocated_by
from ranks import fake_world, on_ranks
from torch import Tensor, nn

import vescale_compile as vc
from vescale_compile import backend
from vescale_compile.passes import agreed
from vescale_compile.passes.context import Part
from vescale_compile.report import GraphReport
from vescale_compile.runtime.model import Beside, beside
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`

LAYERS = models.DEEP
AMPLE = 10**9
TIGHT = 34_000
"""Bytes, which leave the last of two graphs room to keep a unit for the backward."""


class Broken(models.Uneven):
    """Two graphs of two layers each."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.layers[1](self.layers[0](x))
        torch._dynamo.graph_break()
        x = self.layers[3](self.layers[2](x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def sharded(build: models.Model = Broken) -> nn.Module:
    torch._dynamo.reset()
    return vc.fully_shard(models.build(build))


def options(budget: int | None = None) -> dict[str, object]:
    return {"lowering": "eager", "cluster": models.SLOW_WIRE, "memory_budget": budget}


@functools.cache
def explained(build: models.Model = Broken, budget: int | None = None) -> Sequence[GraphReport]:
    return vc.explain(sharded(build), *models.batches(1, 11)[0], options=options(budget)).graphs


def compiled(model: nn.Module, budget: int | None = None, layers: bool = False) -> tuple[nn.Module, list[GraphReport]]:
    """The model, or its layers one by one, and the reports of the graphs that its calls compile."""
    graphs: list[GraphReport] = []

    def compile_graph(gm, inputs):
        return backend.vescale(gm, inputs, options=options(budget), on_compiled=graphs.append)

    if not layers:
        return torch.compile(model, backend=compile_graph), graphs
    for layer in model.layers:
        layer.compile(backend=compile_graph)
    return model, graphs


def beside_all(model: nn.Module) -> Beside:
    return beside([buffers_in(model)[0]], breaks=False, given=0)


def all_shards(model: nn.Module) -> int:
    return sum(buffer.shard.nbytes for buffer in buffers_in(model))


def taken_by_a_step(model: nn.Module, call: nn.Module, graphs: list[GraphReport]) -> int:
    """What a step takes at its fullest: shards, the slots of the last graph, and what it allocates besides."""
    data = models.batches(1, 11)[0]
    call(*data).backward()
    model.zero_grad()
    return allocated_by(lambda: call(*data).backward()) + all_shards(model) + graphs[-1].slot_bytes


def test_the_last_graph_is_planned_beside_the_shards_of_all_and_what_the_first_keeps():
    with fake_world(2):
        (whole,), (first, last) = explained(models.deep), explained()
    assert (first.beside.last, last.beside.last) == (False, True)
    assert first.beside.kept == 0
    for graph in (first, last):
        assert graph.shard_bytes + graph.beside.shards == whole.shard_bytes
    assert last.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.05)


def test_the_backward_of_a_layer_is_planned_beside_the_gradients_of_those_behind_it():
    with fake_world(2):
        first, last = explained()
        model = sharded()
        layer = beside(buffers_in(model.layers[0]), breaks=False, given=0)
    assert (first.beside.gradients, last.beside.gradients) == (first.beside.shards, 0)
    assert "(gradients of other units)" in str(first)
    assert layer.gradients == layer.shards == all_shards(model) - all_shards(model.layers[0])


class Wide(models.Uneven):
    """A graph break hands on a tensor that is larger than all else."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens)).repeat(1, 1, 400)
        torch._dynamo.graph_break()
        x = self.layers[1](x.unflatten(-1, (400, 13)).sum(2))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@on_ranks(2)
def test_what_one_graph_hands_to_the_next_is_counted_once():
    model = sharded(Wide)
    call, graphs = compiled(model)
    taken = taken_by_a_step(model, call, graphs)
    assert max(graph.peak_bytes for graph in graphs) == pytest.approx(taken, rel=0.1)


def test_what_the_budget_leaves_is_used_by_the_last_graph():
    with fake_world(2):
        least = max(graph.peak_bytes for graph in explained())
        some, ample = (explained(budget=budget) for budget in (least + 400, AMPLE))
    for first, last in (some, ample):
        assert {unit.after_forward for unit in first.units} == {"resharded"}
        assert any(unit.after_forward.startswith("kept") for unit in last.units)
    assert max(graph.peak_bytes for graph in some) <= least + 400 < max(graph.peak_bytes for graph in ample)


def test_a_layer_that_is_compiled_for_all_keeps_nothing_that_it_need_not():
    with fake_world(2):
        call, graphs = compiled(sharded(), AMPLE, layers=True)
        call(*models.batches(1, 11)[0]).backward()
    (layer,) = graphs
    assert not layer.beside.last
    assert {unit.after_forward for unit in layer.units} == {"resharded"}


def carried(graphs: Sequence[GraphReport]) -> list[bool]:
    """Of each graph with a backward, whether its forward launches a gather for it."""
    forwards = [graph.parts[Part.FORWARD].schedule for graph in graphs if Part.BACKWARD in graph.parts]
    return [any(event.startswith("carry") for event in schedule) for schedule in forwards]


def compiled_by_layers(build: models.Model) -> list[GraphReport]:
    with fake_world(2):
        call, graphs = compiled(sharded(build), layers=True)
        call(*models.batches(1, 11)[0]).backward()
    return graphs


def test_what_other_graphs_run_before_its_backward_launches_no_gather_for_it():
    with fake_world(2):
        assert carried(explained()) == [False, True]
    assert carried(compiled_by_layers(models.deep)) == [False]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_that_runs_again_for_its_backward_launches_a_gather_for_it(reentrant):
    found = carried(compiled_by_layers(lambda: models.CheckpointedLayers(2, reentrant)))
    assert found and all(found)


class Growing(models.Uneven):
    """Layers that make a batch twice as large, each: compiled for the first, and once more for the second."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.cat([x, layer(x)])
        return nn.functional.cross_entropy(self.head(x[-len(labels) :]).flatten(0, 1), labels.flatten())


@on_ranks(2)
def test_what_one_rank_compiled_for_a_layer_is_what_another_compiled_for_one_like_it():
    """Dynamo runs for the first layer what it compiled for the second, but on the rank with a batch of one."""
    sizes = [(2, 2), (3, 1)]
    data = [models.batches(1, 11, shape=(size[torch.distributed.get_rank()], 12))[0] for size in sizes]
    model = sharded(Growing)
    call, graphs = compiled(model, layers=True)
    losses = models.train(call, model.parameters(), data)
    assert len(graphs) == 2 + torch.distributed.get_rank()
    unsharded, reference = models.train_unsharded(Growing, data)
    assert losses == pytest.approx(reference)
    assert models.largest_difference(model, unsharded) < 1e-6


def test_what_is_decided_for_a_layer_holds_for_those_like_it():
    with fake_world(2):
        call, graphs = compiled(sharded(Growing), layers=True)
        with mock.patch.object(agreed, "question", wraps=agreed.question) as asked:
            call(*models.batches(1, 11)[0]).backward()
    assert len(graphs) == 2
    assert len({agreed.question(*each.args) for each in asked.call_args_list if "units" in each.args[0]}) == 1


class OneOfTwoHeads(models.Uneven):
    """One graph, and a trained unit that it does not read."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)
        self.heads = nn.ModuleList(nn.Linear(13, 11) for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.heads[0](x).flatten(0, 1), labels.flatten())


def test_a_unit_that_is_never_read_keeps_nobody_from_using_the_budget():
    with fake_world(2):
        (graph,) = explained(OneOfTwoHeads, AMPLE)
    after = {unit.name: unit.after_forward for unit in graph.units}
    assert after.pop("(root)") == "resharded"  # an embedding's backward does not read it
    assert set(after.values()) == {"kept: memory_budget allows it"}


def test_a_budget_that_has_room_makes_no_graph_slower():
    with fake_world(2):
        usual, ample = explained(), explained(budget=AMPLE)
    for before, after in zip(usual, ample, strict=True):
        assert after.exposed_seconds <= before.exposed_seconds * 1.001


class Trained(NamedTuple):
    """Four steps of training within a budget, and what one more takes."""

    graphs: list[GraphReport]
    parameters: dict[str, Tensor]
    losses: list[float]
    taken: int


@functools.cache
def trained(budget: int) -> Trained:
    model = sharded()
    call, graphs = compiled(model, budget)
    losses = models.train(call, model.parameters(), models.batches(4, 11))
    parameters = models.whole(model)
    taken = taken_by_a_step(model, call, graphs)
    return Trained(graphs, parameters, losses, taken)


@on_ranks(2)
def test_the_largest_plan_of_a_models_graphs_is_what_a_step_takes():
    found = trained(TIGHT)
    assert max(graph.peak_bytes for graph in found.graphs) == pytest.approx(found.taken, rel=0.03)


@on_ranks(2)
def test_a_real_step_of_several_graphs_takes_what_the_budget_allows():
    found = trained(TIGHT)
    assert any(unit.after_forward.startswith("kept") for unit in found.graphs[-1].units)
    assert found.taken <= 1.03 * TIGHT


@on_ranks(2)
def test_no_number_changes_with_several_graphs_and_a_budget():
    found = trained(TIGHT)
    assert any(unit.after_forward.startswith("kept") for unit in found.graphs[-1].units)
    unsharded, reference = models.train_unsharded(models.deep, models.batches(4, 11))
    assert found.losses == reference
    assert models.largest_difference(found.parameters, unsharded) == 0.0


def test_a_budget_that_the_shards_of_all_units_leave_no_room_in_is_refused():
    with fake_world(2):
        _, last = explained()
        budget = last.planned_bytes - last.beside.shards - last.slot_bytes // 2  # enough if it were the only graph
        with pytest.raises(Exception, match=r"memory_budget is .* but"):
            explained(budget=budget)


@pytest.fixture
def logged(caplog):
    """The warnings of some steps in a world of two ranks: forwards at once before their backwards, step by step."""

    def steps(call: nn.Module, forwards: int = 1) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                losses = [call(*models.batches(1, 11)[0]) for _ in range(forwards)]
                torch.stack(losses).sum().backward()
        return caplog.text

    return steps


def test_several_forwards_that_wait_for_their_backwards_are_warned_of_once(logged):
    with fake_world(2):
        call, _ = compiled(sharded(models.deep), 38_000)
        found = [logged(call, forwards).count("this step exceeds memory_budget") for forwards in (1, 3)]
    assert found == [0, 1]


@pytest.mark.parametrize(("budget", "warnings"), [(AMPLE, 0), (20_000, 1)])
def test_layers_that_together_exceed_the_budget_are_warned_of_once(logged, budget, warnings):
    with fake_world(2):
        call, _ = compiled(sharded(), budget, layers=True)
        text = logged(call)
    assert text.count("this step exceeds memory_budget") == warnings


class Checkpointed(Broken):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_layers_whose_activations_are_checkpointed_keep_nothing(logged):
    with fake_world(2):
        call, _ = compiled(sharded(Checkpointed), 20_000, layers=True)
        assert "exceeds" not in logged(call)


@on_ranks(2)
def test_what_one_rank_holds_on_to_makes_no_rank_refuse_another_batch():
    """Ranks that compile again wait for nobody: one that refused would leave the others in a collective."""
    call, graphs = compiled(sharded(models.deep), 40_000)
    held = [call(*models.batches(1, 11)[0])]
    if torch.distributed.get_rank() == 1:
        held.clear()
    for length in (11, 10):
        call(*models.batches(1, 11, shape=(2, length))[0]).backward()
    assert len(graphs) >= 2


def test_nothing_is_kept_once_the_backward_has_run_or_never_can():
    with fake_world(2):
        data = models.batches(1, 11)[0]
        model = sharded()
        call, _ = compiled(model)
        loss = call(*data)
        assert beside_all(model).kept > 0
        loss.backward()
        assert beside_all(model).kept == 0
        dropped = call(*data)
        assert beside_all(model).kept > 0
        del dropped
        assert beside_all(model).kept == 0


def test_evaluation_keeps_nothing():
    with fake_world(2), torch.no_grad():
        model = sharded()
        call, graphs = compiled(model)
        held = call(*models.batches(1, 11)[0])
        assert held.numel() == 1
        assert beside_all(model).kept == 0
    assert all(graph.beside.kept == 0 for graph in graphs)


def test_what_uncompiled_code_gathered_is_kept_for_its_backward():
    with fake_world(2):
        data = models.batches(1, 11)[0]
        model = sharded()
        loss = model(*data)
        gathered = sum(buffer.numel * buffer.param_dtype.itemsize for buffer in buffers_in(model))
        assert beside_all(model).kept == gathered
        loss.backward()
        assert beside_all(model).kept == 0


@on_ranks(2)
def test_gradients_that_no_sync_accumulates_are_planned_for():
    data = models.batches(1, 11)[0]
    model = sharded(models.deep)
    call, graphs = compiled(model)
    with vc.no_sync(model):
        call(*data).backward()
        model.zero_grad()  # so that the next are the first to accumulate
        allocated = allocated_by(lambda: [call(*data).backward() for _ in range(2)])
    (graph,) = graphs
    unsharded = sum(buffer.numel * buffer.reduce_dtype.itemsize for buffer in buffers_in(model))
    assert graph.beside.accumulated >= unsharded
    assert "(gradients that no_sync accumulates)" in str(graph)
    taken = allocated + all_shards(model) + graph.slot_bytes
    assert 0.97 * taken < graph.peak_bytes < 1.05 * (taken + graph.beside.accumulated - unsharded)


def test_a_copy_of_a_model_is_a_model_of_its_own():
    with fake_world(2):
        model = sharded()
        copied = copy.deepcopy(model)
        shards = [all_shards(each) for each in (model, copied)]
        planned = [beside_all(each).shards + buffers_in(each)[0].shard.nbytes for each in (model, copied)]
    assert planned == shards


def test_units_that_were_sharded_one_by_one_are_one_model_once_the_root_is_sharded():
    with fake_world(2):
        torch._dynamo.reset()
        model = models.build(Broken)
        for layer in model.layers:
            vc.fully_shard(layer)
        assert beside_all(model.layers[0]).shards == 0
        vc.fully_shard(model)
        buffers = buffers_in(model)
        others = sum(each.shard.nbytes for each in buffers[1:])
        assert beside_all(model).shards == others
