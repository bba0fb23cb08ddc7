"""Small units share collectives where latency is what they cost."""

import functools
import itertools
from dataclasses import replace
from unittest import mock

import models
import pytest
import torch
from ranks import fake_world, on_ranks
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.cost import PRESETS
from vescale_compile.passes.context import Part
from vescale_compile.runtime import collectives, ops

pytestmark = pytest.mark.slow  # left out of `make test-fast`

LATENCY = 1e-2  # seconds, which is far more than anything here takes
H100 = PRESETS["h100"](2)
SLOW_TO_START = replace(H100, within=replace(H100.within, latency=LATENCY))

few_kernels = functools.partial(models.Uneven, 1)


def explained(world_size: int = 2, cluster=SLOW_TO_START, **shard_options):
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(models.Uneven), **shard_options)
    options = {"lowering": "eager", "cluster": cluster, "memory_budget": "1MB"}
    (graph,) = vc.explain(model, *models.batches(1, 11)[0], options=options).graphs
    return graph


@pytest.fixture(scope="module")
def sharing():
    """The report of a model that two ranks train where it takes long to start a collective."""
    with fake_world(2):
        return explained()


def launches(schedule: tuple[str, ...], kind: str) -> list[str]:
    return [event for event in schedule if event.startswith(f"launch {kind}")]


def shared(schedule: tuple[str, ...], kind: str) -> int:
    return sum(event.endswith(", with the next") for event in launches(schedule, kind))


def test_gathers_and_reductions_of_small_units_share_collectives(sharing):
    forward, backward = (part.schedule for part in sharing.parts.values())
    assert shared(forward, "all_gather") > 0
    assert shared(backward, "reduce_scatter") > 0


def test_what_shares_a_collective_is_launched_together(sharing):
    schedule = sharing.parts[Part.FORWARD].schedule
    for event, following in itertools.pairwise(schedule):
        if event.endswith(", with the next"):
            assert following.startswith("launch all_gather")


def test_a_shared_collective_is_predicted_to_take_its_latency_once(sharing):
    forward = sharing.parts[Part.FORWARD]
    collectives_made = len(launches(forward.schedule, "all_gather")) - shared(forward.schedule, "all_gather")
    assert forward.prediction.communication == pytest.approx(collectives_made * LATENCY, rel=0.05)


def test_where_bandwidth_is_what_they_cost_every_unit_has_its_own():
    with fake_world(2):
        graph = explained(cluster=models.SLOW_WIRE)
    assert not any("with the next" in event for part in graph.parts.values() for event in part.schedule)


def test_reductions_that_are_averaged_over_replicas_too_share_both_collectives():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        forward, backward = (part.schedule for part in explained(4, mesh=mesh).parts.values())
    assert shared(forward, "all_gather") > 0
    assert shared(backward, "reduce_scatter") > 0


@on_ranks(4, deadline_s=300)
def test_so_what_is_learned_over_replicas_is_the_same():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert trained_with_and_without_sharing("eager", few_kernels, vc.MixedPrecisionPolicy(), mesh=mesh) == [
        (True, True),
        (False, False),
    ]


@on_ranks(2)
def test_messages_of_cpus_are_not_shared():
    graph = explained()
    assert not any("with the next" in event for part in graph.parts.values() for event in part.schedule)


@pytest.mark.parametrize(
    ("lowering", "build", "policy"),
    [
        ("eager", models.Uneven, vc.MixedPrecisionPolicy()),
        ("inductor", few_kernels, vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    ],
    ids=["eager", "inductor"],
)
@on_ranks(2, deadline_s=300)
def test_training_is_the_same_with_shared_collectives(lowering, build, policy):
    assert trained_with_and_without_sharing(lowering, build, policy) == [(True, True), (False, False)]


def trained_with_and_without_sharing(lowering, build, policy, **shard_options) -> list[tuple[bool, bool]]:
    """Over the backend's own collectives, which those of a GPU are. Whether gathers and reductions were shared."""
    data = models.batches(3, 11)
    losses, params, made = [], [], []
    for cluster in (SLOW_TO_START, models.SLOW_WIRE):
        torch._dynamo.reset()
        with (
            mock.patch.object(collectives, "exchanges_directly", return_value=False),
            mock.patch.object(collectives, "_COALESCING", ("gloo",)),  # right on CPUs, though never needed there
            mock.patch.object(ops, "start_all_gathers", side_effect=collectives.start_all_gathers) as gathers,
            mock.patch.object(
                ops, "start_reduce_scatters", side_effect=collectives.start_reduce_scatters
            ) as reductions,
        ):
            model = vc.fully_shard(models.build(build), mp_policy=policy, **shard_options)
            options = {"lowering": lowering, "cluster": cluster, "memory_budget": "1MB"}
            call = torch.compile(model, backend="vescale", options=options)
            losses.append(models.train(call, model.parameters(), data))
            params.append([param.full_tensor() for param in model.parameters()])
        made.append((gathers.call_count > 0, reductions.call_count > 0))
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *params))
    _, expected = models.train_unsharded(build, data)
    assert losses[0] == pytest.approx(expected, abs=1e-5 if policy.param_dtype is None else 0.05)
    return made


@on_ranks(2)
def test_a_launch_that_waited_for_one_which_never_came_is_forgotten():
    torch._dynamo.reset()
    call = torch.compile(vc.fully_shard(models.build(few_kernels)), backend="vescale", options={"lowering": "eager"})
    data = models.batches(1, 11)[0]
    expected = call(*data)
    ops._gathers.append((torch.zeros(1), torch.zeros(2)))  # of a graph that failed in between
    assert torch.equal(call(*data), expected)
