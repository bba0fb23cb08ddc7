"""``vc.explain``: what is known of a compiled model before its first step."""

import functools
import inspect

import models
import pytest
import torch
from kernels import allocated_by
from ranks import fake_world, on_ranks
from torch.utils.checkpoint import checkpoint

import vescale_compile as vc
from vescale_compile.cost import Cluster
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.passes.context import GraphError, Part
from vescale_compile.passes.summary import Kind
from vescale_compile.report import GraphReport
from vescale_compile.runtime import crossing, pool

pytestmark = pytest.mark.slow  # left out of `make test-fast`


WORDS = 11  # that all of these models know
ONE_LAYER = functools.partial(models.Uneven, 1)


def explained(reshard: bool = True, build: models.Model = models.one_layer_llama, **options):
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(build), reshard_after_forward=reshard)
    return model, vc.explain(model, *models.batches(1, WORDS)[0], options={"lowering": "eager", **options})


@pytest.fixture(scope="module")
def usual():
    """The report of a small Llama that two ranks train."""
    with fake_world(2):
        _, report = explained()
    return report


def test_each_unit_is_gathered_and_reduced_by_its_bytes(usual):
    (graph,) = usual.graphs
    whole = sum(unit.gathered_bytes for unit in graph.units)
    assert graph.parts[Part.FORWARD].nbytes(Kind.ALL_GATHER) == whole
    again = sum(unit.gathered_bytes for unit in graph.units if unit.after_forward == "resharded")
    assert graph.parts[Part.BACKWARD].nbytes(Kind.ALL_GATHER) == again < whole
    assert graph.parts[Part.BACKWARD].nbytes(Kind.REDUCE_SCATTER) == whole
    assert sum(unit.shard_bytes for unit in graph.units) * 2 == whole


def slots_by_layers(*layers: int, cluster: Cluster) -> tuple[list[int], GraphReport]:
    """The bytes of the slots of models of that many layers, and the report of the last."""
    sizes = []
    with fake_world(2):
        for count in layers:
            torch._dynamo.reset()
            model = vc.fully_shard(models.Uneven(count))
            options = {"lowering": "eager", "cluster": cluster}
            (graph,) = vc.explain(model, *models.batches(1, 11)[0], options=options).graphs
            sizes.append(graph.slot_bytes)
    return sizes, graph


def test_layers_share_their_slots_however_many_there_are():
    sizes, graph = slots_by_layers(4, 8, cluster=models.FAST_WIRE)
    layer, root = graph.units[1].gathered_bytes, graph.units[0].gathered_bytes
    # A layer's parameters and gradients, the next one's, and the root's, which live longer.
    assert max(sizes) <= 5 * layer + 2 * root


def test_what_is_launched_further_ahead_where_communication_takes_long_does_not_grow_with_the_layers():
    sizes, _ = slots_by_layers(4, 8, cluster=models.H100)
    assert sizes[0] == sizes[1]


def test_layers_that_are_gathered_in_parts_share_slots_of_three_layers_at_most():
    with fake_world(2):
        torch._dynamo.reset()
        model = vc.fully_shard(Llama(LlamaConfig(layers=4, dim=512, heads=8, kv_heads=4)))
        (graph,) = vc.explain(model, *models.batches(1, 64)[0], options={"lowering": "eager"}).graphs
    parts = [unit.gathered_bytes for unit in graph.units if unit.name.startswith("layers.1#")]
    assert len(parts) == 4
    assert graph.slot_bytes <= 3 * sum(parts)


def test_no_two_buffers_are_in_a_slot_at_a_time(usual):
    slots = [slot for part in usual.graphs[0].parts.values() for slot in part.slots]
    assert slots
    for slot in slots:
        for before, after in zip(slot.tenants, slot.tenants[1:], strict=False):
            assert before.last < after.first


def test_kept_parameters_are_memory_of_their_own():
    with fake_world(2):
        _, report = explained(reshard=False, build=ONE_LAYER)
    (graph,) = report.graphs
    for part in graph.parts.values():  # the backward reads no embedding, whose memory is that of the head
        assert part.peak.parameters == sum(unit.gathered_bytes for unit in graph.units)


@pytest.mark.parametrize(
    ("reshard", "lowering", "build"),
    [(False, "eager", models.one_layer_llama), (True, "inductor", models.one_layer_llama)],
)
@on_ranks(2, deadline_s=300)
def test_the_peak_is_that_of_a_real_step(reshard, lowering, build):
    model, report = explained(reshard, build, lowering=lowering)
    call = torch.compile(model, backend="vescale", options={"lowering": lowering})
    data = models.batches(1, 64)[0]
    call(*data).backward()
    model.zero_grad()
    taken = allocated_by(lambda: call(*data).backward())
    estimated = max(part.peak.nbytes for part in report.graphs[0].parts.values())
    assert estimated == pytest.approx(taken, rel=0.03), f"{estimated} bytes planned, {taken} taken"


class Attention(torch.nn.Module):
    """Two checkpointed layers of long sequences, which PyTorch has draw the same random numbers twice."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 96) for _ in range(2))
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.attend, layer, x, use_reentrant=False) if self.again else self.attend(layer, x)
        return x.square().sum()

    def attend(self, layer, x):
        heads = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in layer(x).chunk(3, -1))
        return x + torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


@functools.cache
def attention(again: bool) -> GraphReport:
    """Of two sequences of 256 tokens, on GPUs."""
    torch._dynamo.reset()
    with fake_world(2):
        options = {"lowering": "eager", "cluster": "h100"}
        (graph,) = vc.explain(vc.fully_shard(Attention(again)), torch.randn(2, 256, 32), options=options).graphs
    return graph


def test_attention_that_runs_again_in_the_backward_has_its_result_in_the_peak():
    tokens = 2 * 256 * 32 * torch.float32.itemsize
    # The batch, what the first layer returned, queries, keys and values, and the result.
    assert attention(again=True).parts[Part.FORWARD].peak.nbytes > (1 + 1 + 3 + 1) * tokens


def test_attention_that_runs_again_in_the_backward_takes_its_time_twice():
    once, twice = (
        {part: summary.prediction.compute for part, summary in attention(again).parts.items()}
        for again in (False, True)
    )
    assert twice[Part.FORWARD] == pytest.approx(once[Part.FORWARD], rel=0.2)
    assert twice[Part.BACKWARD] > once[Part.BACKWARD] + 0.5 * once[Part.FORWARD]


def test_sizes_that_are_symbols_count_as_at_capture(usual):
    with fake_world(2):
        torch._dynamo.reset()
        model = vc.fully_shard(models.build(models.one_layer_llama))
        batch = models.batches(1, WORDS)[0]
        for tensor in batch:
            torch._dynamo.mark_dynamic(tensor, 1)
        report = vc.explain(model, *batch, options={"lowering": "eager"})
    dynamic, static = (
        {part: summary.peak.activations for part, summary in found.graphs[0].parts.items()} for found in (report, usual)
    )
    assert dynamic == pytest.approx(static, rel=0.02) and static[Part.FORWARD] > 0


@on_ranks(2)
def test_slots_are_what_the_report_says_and_are_freed_with_the_graphs():
    import gc

    crossing.forget_carried()
    torch._dynamo.reset()
    gc.collect()
    before = sum(memory.tensor.nbytes for memory in pool._memories.values() if memory.tensor is not None)
    model, report = explained(build=models.Uneven)
    torch.compile(model, backend="vescale", options={"lowering": "eager"})(*models.batches(1, WORDS)[0]).backward()
    held = sum(memory.tensor.nbytes for memory in pool._memories.values() if memory.tensor is not None)
    assert (before, held) == (0, report.graphs[0].slot_bytes)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not pool._memories


@on_ranks(2)
def test_explaining_changes_nothing():
    torch.manual_seed(0)
    model = vc.fully_shard(models.build(ONE_LAYER))
    before = {name: param.full_tensor().clone() for name, param in model.named_parameters()}
    state = torch.get_rng_state()
    vc.explain(model, *models.batches(1, WORDS)[0], options={"lowering": "eager"})
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(before[name], param.full_tensor()) for name, param in model.named_parameters())


def test_a_model_that_was_compiled_in_place_is_explained_and_stays_compiled():
    with fake_world(2):
        torch._dynamo.reset()
        model = vc.fully_shard(torch.nn.Linear(4, 2))
        model.compile(backend="vescale", options={"lowering": "eager"})
        compiled = model._compiled_call_impl
        assert vc.explain(model, torch.ones(3, 4)).graphs
        assert model._compiled_call_impl is compiled is not None


def test_a_model_may_be_explained_as_often_as_one_likes():
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this PyTorch counts what vc.explain compiles against Dynamo's recompile limit")
    limit = 2
    with fake_world(2), torch._dynamo.config.patch(recompile_limit=limit):
        model = vc.fully_shard(torch.nn.Linear(4, 2))
        for count in range(limit + 1):
            assert vc.explain(model, torch.ones(3, 4), options={"memory_budget": 2**20 + count}).graphs


def test_what_compiling_wraps_explaining_raises_itself():
    with fake_world(2):
        model, options = vc.fully_shard(torch.nn.Linear(4, 2)), {"memory_budget": 1}
        with pytest.raises(GraphError, match="memory_budget is"):
            vc.explain(model, torch.ones(3, 4), options=options)
        with pytest.raises(ValueError, match=r"memory_budget.*much"):
            vc.explain(model, torch.ones(3, 4), options={"memory_budget": "much"})
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as wrapped:
            torch.compile(model, backend="vescale", options=options)(torch.ones(3, 4))
    assert isinstance(wrapped.value.inner_exception, GraphError)


def test_explaining_leaves_running_statistics_as_they_are():
    with fake_world(2):
        model = vc.fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))
        vc.explain(model, torch.ones(3, 4))
    assert model[1].num_batches_tracked == 0
    assert model[1].running_mean.tolist() == [0.0, 0.0]


def test_the_text_names_units_collectives_slots_and_memory(usual):
    text = str(usual)
    for words in ("layers.0", "launch all_gather of (root)", "slot 0", "nothing is copied or cast", "memory at most"):
        assert words in text
    assert "no schedule takes less than" in text and "exposed communication, on 2 x cpu" in text


def test_the_prediction_is_the_schedules_timeline(usual):
    (graph,) = usual.graphs
    for part in graph.parts.values():
        found = part.prediction
        assert found.seconds == pytest.approx(found.compute + found.exposed + found.starved + found.slowdown)
        assert found.least <= found.seconds * (1 + 1e-9)
        launched = [event for event in part.schedule if event.startswith(("launch", "take"))]
        assert len(found.transfers) == sum(not event.endswith(", with the next") for event in launched)
        assert all(0 <= span.start < span.stop <= found.seconds * (1 + 1e-9) for span in found.transfers)
        assert found.computation[-1].stop <= found.seconds * (1 + 1e-9)
    assert graph.predicted_seconds == sum(part.prediction.seconds for part in graph.parts.values())
    assert 0 < graph.exposed_seconds < graph.predicted_seconds


def test_a_graph_with_nothing_to_communicate_is_predicted_to_compute():
    with fake_world(1):
        _, report = explained(build=ONE_LAYER)
    assert all(part.prediction.seconds >= part.prediction.compute > 0 for part in report.graphs[0].parts.values())


def test_a_model_that_is_not_sharded_has_nothing_to_explain():
    torch._dynamo.reset()
    report = vc.explain(models.build(ONE_LAYER), *models.batches(1, WORDS, rank=0)[0], options={"lowering": "eager"})
    assert report.graphs == ()
    assert "call fully_shard" in str(report)
