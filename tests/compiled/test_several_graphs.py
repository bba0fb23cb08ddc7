"""Models of several graphs: what a step takes beside the one that is compiled is in its plan, and in its budget."""

import copy
import logging
import re
from collections.abc import Sequence

import models
import pytest
import torch
from kernels import most_allocated
from ranks import fake_world, on_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc
from vescale_compile import backend
from vescale_compile.report import GraphReport
from vescale_compile.runtime.model import Beside, beside
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`

LAYERS = 6
AMPLE = 10**9


class Broken(models.Uneven):
    """Two graphs of three layers each."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.layers[2](self.layers[1](self.layers[0](x)))
        torch._dynamo.graph_break()
        x = self.layers[5](self.layers[4](self.layers[3](x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def sharded(build: models.Model = Broken) -> nn.Module:
    torch._dynamo.reset()
    return vc.fully_shard(models.build(build))


def options(budget: int | None = None) -> dict[str, object]:
    return {"lowering": "eager", "cluster": models.SLOW_WIRE, "memory_budget": budget}


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
    return beside([buffers_in(model)[0]], trains=True, accumulates=False)


def most_of_a_step(model: nn.Module, call: nn.Module) -> int:
    """What a step that has run before allocates at its fullest, on top of slots and shards."""
    data = models.batches(1, 11)[0]
    call(*data).backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call(*data).backward()
    return most_allocated(trace)


def test_the_second_graph_is_planned_beside_the_shards_and_what_the_first_keeps():
    with fake_world(2):
        (whole,), (first, second) = explained(models.deep), explained()
    assert first.beside.kept == 0
    assert second.beside.kept > first.parts[next(iter(first.parts))].peak.nbytes // 2
    for graph in (first, second):
        assert graph.shard_bytes + graph.beside.shards == whole.shard_bytes
    assert second.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.05)


def test_the_first_graph_is_planned_with_as_much_again_for_units_laid_out_alike_and_their_gradients():
    with fake_world(2):
        first, second = explained()
    assert (first.beside.to_come, first.beside.repeats) == (3, 1.0)
    assert first.beside.gradients == first.beside.shards
    assert (second.beside.to_come, second.beside.repeats, second.beside.gradients) == (0, 0.0, 0)
    assert first.peak_bytes == pytest.approx(second.peak_bytes, rel=0.05)


@on_ranks(2)
def test_the_largest_plan_of_a_models_graphs_is_what_a_step_takes():
    model = sharded()
    call, graphs = compiled(model)
    most = most_of_a_step(model, call)
    shards, slots = sum(buffer.shard.nbytes for buffer in buffers_in(model)), graphs[-1].slot_bytes
    assert max(graph.peak_bytes for graph in graphs) == pytest.approx(most + shards + slots, rel=0.1)


@on_ranks(2)
def test_the_plan_of_a_layer_compiled_for_all_is_what_a_step_takes():
    model = sharded()
    call, graphs = compiled(model, layers=True)
    most = most_of_a_step(model, call)
    (layer,) = graphs
    assert layer.beside.repeats == LAYERS - 1
    shards = sum(buffer.shard.nbytes for buffer in buffers_in(model))
    # The loss, and all that is not in layers, is not compiled, and no plan knows of it.
    assert 0.7 * (most + shards + layer.slot_bytes) < layer.peak_bytes < 1.1 * (most + shards + layer.slot_bytes)


def test_what_the_budget_leaves_is_used_by_the_last_graph_and_none_exceeds_it():
    with fake_world(2):
        least = max(graph.peak_bytes for graph in explained())
        some, ample = (explained(budget=budget) for budget in (least + 1500, AMPLE))
    for first, last in (some, ample):
        assert {unit.after_forward for unit in first.units} == {"resharded"}
        assert any(unit.after_forward.startswith("kept") for unit in last.units)
    assert max(graph.peak_bytes for graph in some) <= least + 1500 < max(graph.peak_bytes for graph in ample)


@on_ranks(2)
def test_a_real_step_of_several_graphs_takes_what_the_budget_allows():
    budget = 36_000
    model = sharded()
    call, graphs = compiled(model, budget)
    most = most_of_a_step(model, call)
    assert any(unit.after_forward.startswith("kept") for unit in graphs[-1].units)
    shards = sum(buffer.shard.nbytes for buffer in buffers_in(model))
    assert shards + graphs[-1].slot_bytes + most <= 1.1 * budget


@on_ranks(2)
def test_no_number_changes_with_several_graphs_and_a_budget():
    data = models.batches(4, 11)
    model = sharded()
    losses = models.train(compiled(model, 36_000)[0], model.parameters(), data)
    unsharded, reference = models.train_unsharded(models.deep, data)
    assert losses == reference
    assert models.largest_difference(model, unsharded) == 0.0


def test_a_graph_that_does_not_fit_beside_the_others_is_refused():
    with fake_world(2):
        _, second = explained()
        budget = second.peak_bytes - second.beside.kept + 2000  # enough if it were alone
        with pytest.raises(Exception, match=r"memory_budget is .* but") as refused:
            explained(budget=budget)
    assert re.search(r"what there is beside this graph|overlaps nothing needs", str(refused.value))


def test_that_the_budget_may_not_be_used_up_is_said_once(caplog):
    backend._warn_of_several_graphs.cache_clear()
    with fake_world(2), caplog.at_level(logging.WARNING):
        explained(models.deep, AMPLE)
        assert not caplog.records
        explained(budget=AMPLE)
        explained(budget=AMPLE)
    assert caplog.text.count("runs as several graphs") == 1


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
    assert all(graph.beside.kept == graph.beside.gradients == 0 for graph in graphs)


def test_what_uncompiled_code_gathered_is_kept_for_its_backward():
    with fake_world(2):
        data = models.batches(1, 11)[0]
        model = sharded()
        loss = model(*data)
        gathered = sum(buffer.numel * buffer.param_dtype.itemsize for buffer in buffers_in(model))
        assert beside_all(model).kept == gathered
        assert beside_all(model).to_come == 0
        loss.backward()
        assert beside_all(model).kept == 0


def test_gradients_that_no_sync_accumulates_are_planned_for():
    with fake_world(2):
        data = models.batches(1, 11)[0]
        model = sharded(models.deep)
        call, graphs = compiled(model)
        with vc.no_sync(model):
            call(*data).backward()
        unsharded = sum(buffer.numel * buffer.reduce_dtype.itemsize for buffer in buffers_in(model))
    (graph,) = graphs
    scratch = max(buffer.comm().reduce_scratch * 4 for buffer in buffers_in(model))
    assert graph.beside.accumulated == unsharded + scratch
    assert f"{unsharded / 1000:.1f} kB   (gradients that no_sync accumulates)" in str(graph)


def test_a_copy_of_a_model_is_a_model_of_its_own():
    with fake_world(2):
        model = sharded()
        copied = copy.deepcopy(model)
        shards = [sum(buffer.shard.nbytes for buffer in buffers_in(each)) for each in (model, copied)]
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
