"""The last reductions of a backward are waited for when their gradients are first read."""

import contextlib
import copy
import functools
import gc
import io
import os
import sys
from dataclasses import replace
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from handmade import Graph, context
from ranks import fake_world, on_ranks
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc
from vescale_compile.passes.context import Part, Role, Use, comm_of
from vescale_compile.passes.leave import leave
from vescale_compile.passes.summary import Direction, Kind
from vescale_compile.ragged.arriving import ArrivingDTensor
from vescale_compile.runtime import arrivals

pytestmark = pytest.mark.slow  # left out of `make test-fast`

OPTIONS = {"lowering": "eager", "cluster": models.SLOW_WIRE}
BF16 = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
QUANTIZED = vc.BlockInt8(block=1)


def backward_of(model: models.Model = models.Uneven, **shard_options):
    torch._dynamo.reset()
    sharded = vc.fully_shard(models.build(model), **shard_options)
    (graph,) = vc.explain(sharded, *models.batches(1, 11)[0], options=OPTIONS).graphs
    return graph.parts[Part.BACKWARD]


# Models that tests shard alike run what Dynamo compiled for the first: what has it forget that comes last in this file.
def after_backward(lowering: str = "eager", built: models.Model = models.Uneven, **shard_options):
    """A model whose gradients have just been computed, and how to compute them once more."""
    model = vc.fully_shard(models.build(built), **shard_options)
    call = torch.compile(model, backend="vescale", options={**OPTIONS, "lowering": lowering})
    data = models.batches(1, 11)[0]
    call(*data).backward()
    return model, lambda: call(*data).backward()


def arriving(model: torch.nn.Module) -> list[ArrivingDTensor]:
    return [param.grad for param in model.parameters() if isinstance(param.grad, ArrivingDTensor)]


def in_flight() -> int:
    return sum(not arrival.over for arrival in arrivals._arrivals.values())


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.grad.full_tensor() for param in model.parameters()]


@functools.cache
def reference(steps: int = 1) -> list[torch.Tensor]:
    """Gradients of the unsharded model, averaged over the ranks, of as many equal steps."""
    model = models.build(models.Uneven)
    for _ in range(steps):
        model(*models.batches(1, 11)[0]).backward()
    models.average_gradients(model)
    return [param.grad for param in model.parameters()]


def test_the_schedule_says_which_reductions_are_left():
    with fake_world(2):
        schedule = backward_of().schedule
    left = [event for event in schedule if event.startswith("leave")]
    assert left == list(schedule[-len(left) :])
    assert "leave reduce_scatter of (root)" in left


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}, {"quantize_gradients": QUANTIZED}])
@on_ranks(2)
def test_gradients_are_on_their_way_until_one_reads_them(options):
    model, _ = after_backward(**options)
    assert in_flight() > 0
    assert 0 < len(arriving(model)) < len(list(model.parameters()))
    gradients(model)
    assert in_flight() == 0


@on_ranks(2)
def test_reading_what_was_reduced_before_waits_for_nothing():
    model, _ = after_backward()
    before = in_flight()
    for param in model.parameters():
        if not isinstance(param.grad, ArrivingDTensor):
            param.grad.to_local().sum()
    assert in_flight() == before


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2, deadline_s=300)
def test_what_is_read_are_the_gradients_of_the_unsharded_model(lowering):
    model, _ = after_backward(lowering)
    close = torch.equal if lowering == "eager" else torch.allclose
    assert all(map(close, gradients(model), reference()))


@on_ranks(2)
def test_gradients_that_nobody_reads_before_the_next_step_are_added_to():
    model, backward = after_backward()
    backward()
    assert all(map(torch.allclose, gradients(model), reference(steps=2)))


@on_ranks(2)
def test_what_was_left_is_over_before_the_next_graph_runs():
    model, backward = after_backward()
    first = list(arrivals._arrivals.values())
    model.zero_grad()
    backward()
    assert all(arrival.over for arrival in first)


@on_ranks(2)
def test_a_gradient_may_be_copied_and_saved_on_its_way():
    model, _ = after_backward()
    first, *_, last = arriving(model)
    assert torch.equal(copy.deepcopy(first).to_local(), first.to_local())
    torch.save(last, saved := io.BytesIO())
    saved.seek(0)
    assert torch.equal(torch.load(saved).to_local(), last.to_local())


@on_ranks(2)
def test_where_autograd_looks_for_nan_nothing_is_left():
    with torch.autograd.detect_anomaly(check_nan=True):
        model, _ = after_backward()
    assert arriving(model) == []
    assert all(map(torch.equal, gradients(model), reference()))


@on_ranks(2)
def test_where_nccl_looks_for_nan_it_finds_none_in_what_pads_gradients_that_were_quantized():
    torch.use_deterministic_algorithms(True)  # fills with NaN what is allocated
    try:
        with mock.patch.dict(os.environ, TORCH_NCCL_NAN_CHECK="1"):
            model, _ = after_backward(built=models.Uneven, quantize_gradients=QUANTIZED)
    finally:
        torch.use_deterministic_algorithms(False)
    for grad in arriving(model):
        local = grad.to_local()
        whole = local.as_strided((local.untyped_storage().nbytes() // local.itemsize,), (1,), 0)
        assert not whole.isnan().any()


@on_ranks(2)
def test_one_rank_alone_may_look_for_nan():
    model, again = after_backward()
    model.zero_grad()
    with torch.autograd.detect_anomaly() if dist.get_rank() == 0 else contextlib.nullcontext():
        again()
    assert all(map(torch.equal, gradients(model), reference()))


@on_ranks(2)
def test_gradients_in_lower_precision_are_cast_when_they_are_read():
    model, _ = after_backward(mp_policy=BF16)
    assert {grad.dtype for grad in arriving(model)} == {torch.float32}
    assert all(torch.allclose(*pair, rtol=0.1, atol=0.02) for pair in zip(gradients(model), reference(), strict=True))


def test_those_casts_are_counted():
    with fake_world(2):
        entries = backward_of(mp_policy=BF16).entries
    casts = [entry.unit for entry in entries if entry.kind is Kind.CAST and entry.direction is Direction.REDUCE]
    assert sorted(casts) == ["(root)", "layers.0", "layers.1"]


def test_reductions_whose_wait_communicates_are_waited_for_in_the_backward():
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        schedule = backward_of(mesh=mesh).schedule
    assert not any(event.startswith("leave") for event in schedule)


def test_a_wait_that_communicates_keeps_no_other_from_being_left():
    graph, backward = Graph(), context(Part.BACKWARD, reduced=(0, 1))
    over_replicas = replace(backward.units[1], comm=backward.units[1].comm._replace(replicas="1"))
    backward = replace(backward, units=(backward.units[0], over_replicas))
    started = [graph.launch_reduction_of(graph.write_gradient(graph.buffer(Use.GRADIENTS, unit))) for unit in range(2)]
    graph.graph.output(tuple(map(graph.wait_reduction_of, started)))
    leave(fx.GraphModule({}, graph.graph), backward)
    roles = [mark.role for node in graph.graph.nodes if (mark := comm_of(node)) is not None]
    assert roles == [Role.LAUNCH, Role.LAUNCH, Role.LEAVE, Role.WAIT]


@on_ranks(2)
def test_a_reduction_that_failed_fails_whoever_reads_it():
    def fail() -> None:
        raise RuntimeError("timed out")

    result = torch.zeros(4)
    arrivals.leave(result, (), fail)
    arrival = arrivals.arrival_of(result)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            arrival.wait()
    arrivals._arrivals.clear()


@on_ranks(2)
def test_a_fused_optimizer_trains_as_on_the_unsharded_model():
    data = models.batches(2, 11)
    model, unsharded = vc.fully_shard(models.build(models.Uneven)), models.build(models.Uneven)
    compiled = torch.compile(model, backend="vescale", options=OPTIONS)
    for each, call in ((model, compiled), (unsharded, unsharded)):
        optimizer = torch.optim.AdamW(each.parameters(), fused=True)
        for batch in data:
            call(*batch).backward()
            if each is unsharded:
                models.average_gradients(each)
            optimizer.step()
            optimizer.zero_grad()
    assert models.largest_difference(model, unsharded) < 1e-6  # its kernels round the ends of tensors otherwise


@on_ranks(2)
def test_a_model_may_be_gone_before_its_gradients_have_come():
    model, backward = after_backward(quantize_gradients=QUANTIZED)
    del model, backward
    gc.collect()
    model, _ = after_backward()
    assert all(map(torch.equal, gradients(model), reference()))


@on_ranks(2)
def test_what_a_reduction_uses_is_kept_until_it_is_over_and_no_longer():
    result, used = torch.zeros(4), torch.zeros(8)
    references = sys.getrefcount(used), sys.getrefcount(result)
    arrivals.leave(result, (used,), lambda: None)
    assert (sys.getrefcount(used), sys.getrefcount(result)) > references
    arrivals.arrival_of(result).wait()
    assert (sys.getrefcount(used), sys.getrefcount(result)) == references


@on_ranks(2)
def test_a_profiler_may_end_before_the_gradients_are_read():
    model, backward = after_backward()
    for _ in range(3):
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]):
            backward()
        assert in_flight() == 0
        assert all(map(torch.equal, gradients(model), reference()))


@on_ranks(2)
def test_where_generated_code_looks_for_nan_nothing_is_left():
    torch._dynamo.reset()  # or a graph that was compiled before would serve
    with torch._inductor.config.patch(nan_asserts=True):
        model, _ = after_backward()
    assert arriving(model) == []
