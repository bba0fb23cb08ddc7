"""``fully_shard`` over a 2-D mesh: sharded over dimension 1, replicated over dimension 0."""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import models
import pytest
import test_exactness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import fake_world, on_ranks
from test_census import counted, total
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_

import vescale_compile as vc
from vescale_compile.cost import PRESETS, collective_cost
from vescale_compile.passes.context import Part
from vescale_compile.passes.summary import Kind
from vescale_compile.runtime import collectives
from vescale_compile.runtime.agreement import RanksDisagree, agree, agree_on_buffers
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`

one_layer = functools.partial(models.Uneven, 1)


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def over_nodes(model: torch.nn.Module) -> torch.nn.Module:
    """All of it over two ranks, twice."""
    return vc.fully_shard(model, mesh=mesh_of(2, 2))


def averaged_gradients(data: list[models.Batch]) -> list[torch.Tensor]:
    """Of the unsharded model, summed over the batches and averaged over the ranks."""
    reference = models.build(models.Uneven)
    for tokens, labels in data:
        reference(tokens, labels).backward()
    models.average_gradients(reference)
    return [param.grad for param in reference.parameters()]


class Steps(NamedTuple):
    """Gradients accumulated over three batches, and what three steps gave after that."""

    accumulated: list[torch.Tensor]
    losses: list[float]
    params: dict[str, torch.Tensor]
    shards: dict[str, torch.Tensor]  # this rank's, by unit


@functools.cache
def stepped(lowering: str | None, shard: Callable[[torch.nn.Module], torch.nn.Module]) -> Steps:
    """Of one compilation, of which several tests look at something each."""
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven, compile=lowering, shard=shard)
    data = models.batches(3, 11)
    with vc.no_sync(model):
        for tokens, labels in data[:-1]:
            call(tokens, labels).backward()
    call(*data[-1]).backward()
    accumulated = [param.grad.full_tensor() for param in model.parameters()]
    model.zero_grad()
    losses = models.train(call, model.parameters(), data)
    shards = {each.name: each.shard.detach().clone() for each in buffers_in(model)}
    return Steps(accumulated, losses, models.whole(model), shards)


def assert_accumulated_gradients_are_averaged(steps: Steps) -> None:
    for found, expected in zip(steps.accumulated, averaged_gradients(models.batches(3, 11)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def assert_trained_as_the_unsharded_model(steps: Steps, backend: str | None = None) -> None:
    reference, expected = test_exactness.reference_run(models.Uneven, backend, 11, 3, models.sgd)
    assert max(abs(a - b) for a, b in zip(steps.losses, expected, strict=True)) < 1e-6
    assert models.largest_difference(steps.params, reference) < 1e-6


def assert_clipped_as_the_unsharded_model(model: torch.nn.Module, call: torch.nn.Module, **how: bool) -> None:
    data = models.batches(1, 11)
    call(*data[0]).backward()
    expected = averaged_gradients(data)
    norm = clip_grad_norm_(model.parameters(), 0.1, **how)
    reference = [torch.nn.Parameter(grad.clone()) for grad in expected]
    for param, grad in zip(reference, expected, strict=True):
        param.grad = grad
    torch.testing.assert_close(norm, clip_grad_norm_(reference, 0.1))
    for param, clipped in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), clipped.grad, rtol=0, atol=1e-6)


def over_replicas(tensor: torch.Tensor) -> torch.Tensor:
    """What every rank that holds this shard has of it."""
    found = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(found, tensor.contiguous(), group=mesh_of(2, 2).get_group("replicate"))
    return torch.stack(found)


@on_ranks(4)
def test_parameters_are_sharded_over_dimension_1_alone():
    mesh = mesh_of(2, 2)
    model, _ = models.sharded(models.Uneven, mesh=mesh)
    for param in model.parameters():
        assert param.device_mesh == mesh["shard"]
        assert len(param.placement.local_units) == 2


@pytest.mark.parametrize("lowering", ["eager", None])
@on_ranks(4)
def test_training_is_that_of_the_unsharded_model(lowering):
    assert_trained_as_the_unsharded_model(stepped(lowering, over_nodes))


@on_ranks(4)
def test_averages_over_replicas_are_counted_as_a_profiler_counts_them():
    graphs, step, profile = counted(one_layer, "eager", 11, mesh=mesh_of(2, 2))
    assert graphs == step, (graphs - step, step - graphs)
    averaged = profile.collectives["all_reduce"].payload_bytes
    assert averaged == total(graphs, Kind.ALL_REDUCE) == total(graphs, Kind.REDUCE_SCATTER) / 2


def test_averages_over_replicas_are_part_of_what_is_predicted():
    predicted = []
    for world_size, shape in ((2, None), (4, (2, 2))):
        torch._dynamo.reset()
        with fake_world(world_size):
            model = vc.fully_shard(models.build(one_layer), mesh=mesh_of(*shape) if shape else None)
            options = {"lowering": "eager", "cluster": models.SLOW_WIRE}
            (graph,) = vc.explain(model, *models.batches(1, 11)[0], options=options).graphs
            predicted.append(graph.parts[Part.BACKWARD].prediction.communication)
    across = models.SLOW_WIRE.of(2, stride=2)
    averages = [collective_cost(across, "all_reduce", unit.gathered_bytes / 2).seconds for unit in graph.units]
    assert predicted[1] - predicted[0] == pytest.approx(sum(averages)) and min(averages) > 0


def test_averages_over_the_network_are_predicted_to_go_beside_what_stays_within_nodes():
    torch._dynamo.reset()
    h100 = PRESETS["h100"](4)
    slow = {name: replace(getattr(h100, name), bandwidth=1e6) for name in ("within", "between")}
    nodes = replace(h100, ranks_per_node=2, **slow)
    with fake_world(4):
        model = vc.fully_shard(models.build(models.one_layer_llama), mesh=mesh_of(2, 2))
        options = {"lowering": "eager", "cluster": nodes}
        (graph,) = vc.explain(model, *models.batches(1, 64)[0], options=options).graphs
    spans = [span for span in graph.parts[Part.BACKWARD].prediction.transfers if "reduce" in span.what]
    assert any(after.start < before.stop for before, after in itertools.pairwise(spans))


@on_ranks(4, deadline_s=300)
def test_inductor_lowering_is_within_rounding_of_the_unsharded_model():
    loss, params = test_exactness.compare(one_layer, "inductor", None, 11, steps=3, mesh=mesh_of(2, 2))
    assert loss < 1e-5
    assert params < 1e-5


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@on_ranks(2)
def test_a_dimension_of_size_1_is_no_dimension(shape):
    loss, params = test_exactness.compare(one_layer, "eager", None, 11, steps=3, mesh=mesh_of(*shape))
    assert loss < 1e-6
    assert params < 1e-6


@pytest.mark.parametrize("lowering", ["eager", None])
@on_ranks(4)
def test_after_three_steps_replicas_hold_equal_parameters(lowering):
    for name, shard in stepped(lowering, over_nodes).shards.items():
        first, second = over_replicas(shard)
        assert torch.equal(first, second), name


@pytest.mark.parametrize("lowering", ["eager", None])
@on_ranks(4)
def test_gradients_accumulated_under_no_sync_are_averaged_over_all_ranks(lowering):
    assert_accumulated_gradients_are_averaged(stepped(lowering, over_nodes))


@on_ranks(4)
def test_a_norm_counts_each_element_once():
    assert_clipped_as_the_unsharded_model(*models.sharded(models.Uneven, compile=None, mesh=mesh_of(2, 2)))


@on_ranks(4)
def test_a_checkpoint_saved_over_2_by_2_loads_over_2_by_2_and_over_4(tmp_path: Path):
    saved = over_nodes(models.build(models.Uneven))
    optimizer = models.adamw(saved.parameters())
    saved(*models.batches(1, 11)[0]).backward()
    optimizer.step()
    weights, states = get_state_dict(saved, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
    for mesh in (mesh_of(2, 2), None):
        loaded = vc.fully_shard(models.build(models.Uneven, seed=1), mesh=mesh)
        other = models.adamw(loaded.parameters())
        weights, states = get_state_dict(loaded, other)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
        set_state_dict(loaded, other, model_state_dict=weights, optim_state_dict=states)
        assert models.largest_difference(loaded, _whole(saved)) == 0.0
        for mine, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
            moment, expected = (o.state[p]["exp_avg"].full_tensor() for o, p in ((other, mine), (optimizer, theirs)))
            assert torch.equal(moment, expected)


def _whole(model: torch.nn.Module) -> torch.nn.Module:
    """An unsharded model with the sharded one's values."""
    whole = models.build(models.Uneven)
    whole.load_state_dict(models.whole(model))
    return whole


@pytest.mark.parametrize("lowering", ["eager", None])
@on_ranks(4)
def test_a_replica_with_another_model_is_named_on_every_rank(lowering):
    torch._dynamo.reset()
    replica = dist.get_rank() // 2
    model = models.Uneven(layers=2 + replica)
    vc.fully_shard(model, mesh=mesh_of(2, 2))
    call = torch.compile(model, backend="vescale", options={"lowering": lowering}) if lowering else model
    with pytest.raises(Exception, match=r"ranks 2, 3 differ from the others: rank 2 has .* where rank 0 has"):
        call(*models.batches(1, 11)[0])


@pytest.mark.parametrize("lowering", ["eager", None])
@on_ranks(4)
def test_a_replica_that_begins_with_other_values_is_found(lowering):
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(models.Uneven, seed=dist.get_rank() // 2), mesh=mesh_of(2, 2))
    call = torch.compile(model, backend="vescale", options={"lowering": lowering}) if lowering else model
    with pytest.raises(Exception, match=r"rank [23] differs from the others: .*seed all ranks alike"):
        call(*models.batches(1, 11)[0])


@pytest.mark.parametrize("odd", [0, 3])  # rank 0 compares
@on_ranks(4)
def test_ranks_whose_own_shards_are_equal_hear_of_replicas_that_are_not(odd):
    model = models.build(models.Uneven)
    vc.fully_shard(model, mesh=mesh_of(2, 2))
    if dist.get_rank() == odd:
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().add_(1)
    with pytest.raises(RanksDisagree, match=r"rank [23] differs from the others: .*seed all ranks alike"):
        agree_on_buffers(buffers_in(model), deadline_s=30)
    agree(mesh_of(2, 2), "what comes after it", [], deadline_s=10)


@on_ranks(4)
def test_what_pads_the_shards_of_replicas_is_equal_however_their_memory_came_to_be():
    with torch.device("meta"):
        model = models.Uneven()
    vc.fully_shard(model, mesh=mesh_of(2, 2))
    assert any(len(buffer.shard) > sum(slot.local_numel for slot in buffer.slots) for buffer in buffers_in(model))
    model._apply(lambda each: torch.full_like(each, 7.0 * dist.get_rank(), device="cpu"))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    model(*models.batches(1, 11)[0]).backward()


@on_ranks(4)
def test_another_mesh_on_one_replica_is_found():
    both, mesh = mesh_of(2, 2), init_device_mesh("cpu", (4,))
    model = vc.fully_shard(models.build(models.Uneven), mesh=both if dist.get_rank() < 2 else mesh)
    with pytest.raises(Exception, match=r"ranks 2, 3 differ .* mesh \(4,\)"):
        model(*models.batches(1, 11)[0])


@on_ranks(4)
def test_the_units_of_a_model_are_sharded_over_one_mesh():
    mesh = mesh_of(2, 2)
    model = models.build(models.Uneven)
    vc.fully_shard(model.layers[0], mesh=mesh["shard"])
    with pytest.raises(ValueError, match=rf"\[rank {dist.get_rank()}\].*is sharded over"):
        vc.fully_shard(model, mesh=mesh)


@on_ranks(4)
def test_a_copy_of_the_model_trains_on_the_same_mesh():
    model, _ = models.sharded(models.Uneven, compile=None, mesh=mesh_of(2, 2))
    copied = copy.deepcopy(model)
    models.train(copied, copied.parameters(), models.batches(1, 11))
    models.train(model, model.parameters(), models.batches(1, 11))
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())


@on_ranks(4)
def test_replicas_ask_the_same_questions_where_collectives_are_the_backends_own():
    torch._dynamo.reset()
    asked: list[str] = []

    def decide(question: str, answer: str) -> str:
        asked.append(question)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "exchanges_directly", lambda device, group: False)
        patch.setattr("vescale_compile.capture.first_decides", lambda mesh: decide)
        _, call = models.sharded(one_layer, mesh=mesh_of(2, 2))
        call(*models.batches(1, 11)[0]).backward()
    of_all: list[list[str]] = [[]] * 4
    dist.all_gather_object(of_all, asked)
    assert len(asked) == 3 and of_all == [asked] * 4  # which units are kept, and a schedule for each graph
