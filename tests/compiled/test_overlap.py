"""Communication beside computation: what is launched when, and that a step runs so."""

import contextlib
import functools
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.cost import PRESETS
from vescale_compile.passes import fitting
from vescale_compile.passes.agreed import Agreed
from vescale_compile.passes.context import GraphError, Part
from vescale_compile.runtime import collectives, messages
from vescale_compile.schedule import Compute, ScheduleError, TaskGraph, Transfer, find_schedule, least_peak
from vescale_compile.schedule.early import IN_FLIGHT

overlap = importlib.import_module("vescale_compile.passes.overlap")  # which the pass of that name hides


class OneLarge(models.Uneven):
    """A layer of four times the size of the others."""

    def __init__(self) -> None:
        super().__init__(layers=6)
        self.layers[3] = torch.nn.Sequential(torch.nn.Linear(13, 28), torch.nn.Tanh(), torch.nn.Linear(28, 13))


@contextlib.contextmanager
def exchanging_world(world_size: int) -> Iterator[None]:
    """A fake world whose reductions need scratch, as those of gloo do."""
    with (
        fake_world(world_size),
        mock.patch.object(collectives, "exchanges_directly", return_value=True),
        mock.patch.object(messages, "_way_back", lambda group: group),  # over gloo there would be another
    ):
        yield


def explained(build: models.Model = models.deep, reshard: bool = True, **options):
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(build), reshard_after_forward=reshard)
    (graph,) = vc.explain(model, *models.batches(1, 11)[0], options={"lowering": "eager", **options}).graphs
    return graph


@pytest.fixture(scope="module")
def usual():
    """The report of a deep model that two ranks train over a slow wire."""
    with fake_world(2):
        return explained(cluster=models.SLOW_WIRE)


def test_a_gather_is_launched_before_the_unit_ahead_of_it_has_run(usual):
    schedule = usual.parts[Part.FORWARD].schedule
    launched = schedule.index("launch all_gather of layers.3")
    assert launched < schedule.index("wait all_gather of layers.2")


def test_of_gathers_that_take_no_memory_of_their_own_a_few_are_always_in_flight():
    with fake_world(2):
        schedule = explained(reshard=False, cluster=models.SLOW_WIRE).parts[Part.FORWARD].schedule
    events = [event.split()[0] for event in schedule]
    ahead = IN_FLIGHT
    assert events == ["launch"] * ahead + ["wait", "launch"] * (models.DEEP + 1 - ahead) + ["wait"] * ahead


def test_by_default_overlap_takes_what_one_unit_does_in_how_many_parts_it_may_be_gathered():
    compute = tuple(Compute(f"task {position}", 1.0) for position in range(2))

    def in_parts(count: int) -> TaskGraph:
        gathers = [
            Transfer(
                f"gather {unit}#{part}", 0.0, 1.0, readers=(unit,), output_bytes=12 // count, block=f"layers.{unit}"
            )
            for unit in range(2)
            for part in range(count)
        ]
        last = Transfer("reduce", 0.0, 1.0, writers=(1,), input_bytes=5, scratch_bytes=2)
        return TaskGraph(compute, (*gathers, last))

    assert [overlap.room_ahead(in_parts(count)) for count in (1, 2, 4)] == [12 + 7] * 3


def test_reductions_are_waited_for_after_the_next_unit_has_begun(usual):
    schedule = usual.parts[Part.BACKWARD].schedule
    assert schedule.index("wait reduce_scatter of layers.3") > schedule.index("wait all_gather of layers.2")


def test_everything_launched_is_waited_for_or_left_to_who_reads_it(usual):
    for part in usual.parts.values():
        launched = sorted(event.removeprefix("launch ") for event in part.schedule if event.startswith("launch"))
        over = [event.split(maxsplit=1) for event in part.schedule if event.startswith(("wait", "leave"))]
        assert launched == sorted(what for _, what in over)
    carried, taken = (part.schedule for part in usual.parts.values())
    assert sum(event.startswith("carry") for event in carried) == sum(event.startswith("take") for event in taken) == 1


@pytest.mark.slow
def test_what_the_budget_allows_is_used_and_never_exceeded(usual):
    with fake_world(2):
        ample = explained(cluster=models.SLOW_WIRE, memory_budget=usual.peak_bytes + 3000)
        tight = explained(cluster=models.SLOW_WIRE, memory_budget=usual.peak_bytes - 1900)
    assert tight.peak_bytes <= usual.peak_bytes - 1900
    assert usual.peak_bytes < ample.peak_bytes <= usual.peak_bytes + 3000
    exposed = [sum(part.prediction.exposed for part in graph.parts.values()) for graph in (tight, usual, ample)]
    assert exposed[0] > exposed[1] > exposed[2]


@pytest.mark.slow
def test_the_scratch_of_a_reduction_lies_in_a_slot_from_its_launch_to_its_wait_only():
    with exchanging_world(2):
        backward = explained(cluster=models.SLOW_WIRE).parts[Part.BACKWARD]
    lives = {tenant.what: tenant for slot in backward.slots for tenant in slot.tenants}
    for unit in (f"layers.{number}" for number in range(models.DEEP)):
        gradients, scratch = lives[f"gradients of {unit}"], lives[f"scratch of a reduction of {unit}"]
        assert gradients.first < scratch.first < scratch.last == gradients.last


@pytest.mark.slow
def test_where_the_slots_of_what_overlaps_do_not_fit_nothing_overlaps():
    def too_large(tasks, limit=0):
        return find_schedule(tasks, 2 * max(limit, least_peak(tasks)))

    with exchanging_world(2), mock.patch.object(fitting, "find_schedule", too_large):
        usual = explained(OneLarge, cluster=models.SLOW_WIRE)
        budget = usual.peak_bytes - 3000
        assert explained(OneLarge, cluster=models.SLOW_WIRE, memory_budget=budget).peak_bytes <= budget
    with exchanging_world(2), mock.patch.object(fitting, "find_schedule", too_large):  # nothing is decided yet
        overlapping = mock.patch.object(overlap, "synchronous_schedule", too_large)
        with overlapping, pytest.raises(Exception, match="even a schedule that overlaps nothing needs"):
            explained(OneLarge, cluster=models.SLOW_WIRE, memory_budget=budget)


def test_an_impossible_budget_says_what_is_needed():
    with fake_world(2), pytest.raises(GraphError, match=r"\[rank 0\] .*memory_budget is .* needs .*"):
        explained(memory_budget="1KB")


@pytest.mark.parametrize(
    ("option", "value"),
    [("memory_budget", "much"), ("memory_budget", -1), ("memory_budget", True), ("cluster", "cray"), ("cluster", 8)],
)
def test_an_option_that_makes_no_sense_is_refused(option, value):
    with fake_world(2), pytest.raises(Exception, match=f"vescale option {option}="):
        explained(**{option: value})


UNITS = 3  # of models.Uneven


class Trained(NamedTuple):
    """Losses, and of the next step's forward and backward what communication they launch and wait for, each with the
    number of its unit, and how often each call of communication ran."""

    losses: list[float]
    ran: list[tuple[str, int]]
    calls: Counter[str]


CLUSTERS = {
    "slow": models.SLOW_WIRE,
    "fast": replace(models.SLOW_WIRE, within=PRESETS["h100"](2).within, between=PRESETS["h100"](2).within),
}


@functools.cache
def trained(lowering: str, wire: str = "slow") -> Trained:
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven, compile=lowering, cluster=CLUSTERS[wire])
    data = models.batches(3, 11)
    losses = models.train(call, model.parameters(), data)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        call(*data[0]).backward()
    ran = []
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        if found := re.match(r"vescale::((start|wait|carry|take|leave)_(all_gather|reduce_scatter))$", event.name):
            operator, role, kind = found.groups()
            arguments = [each.name for each in getattr(torch.ops.vescale, operator).default._schema.arguments]
            unit = event.concrete_inputs[arguments.index("unit")]
            ran.append((f"{role.replace('start', 'launch')} {kind}", unit))
    calls = Counter(event.name for event in trace.events() if event.name.startswith(("c10d::", "gloo:", "vescale::")))
    return Trained(losses, ran, calls)


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2, deadline_s=300)
def test_a_profiled_step_launches_and_waits_in_the_order_of_the_schedule(lowering):
    graph = explained(models.Uneven, lowering=lowering, cluster=models.SLOW_WIRE)
    ran = [f"{what} of {graph.units[unit].name}" for what, unit in trained(lowering).ran]
    assert ran == [event for part in graph.parts.values() for event in part.schedule]


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2, deadline_s=300)
def test_a_profiled_forward_and_backward_run_the_collectives_of_the_graphs_and_no_other(lowering):
    calls = trained(lowering).calls.items()
    ran = Counter({name: n for name, n in calls if not name.endswith("_into")})  # gradients, written in place
    ended = ran.pop("vescale::wait_reduce_scatter", 0) + ran.pop("vescale::leave_reduce_scatter")
    # Over gloo each rank sends the other its part: one message each way for a gather, and one for a reduction. Of the
    # gathers for the backward one is carried over, and one is not needed.
    assert ended == UNITS
    assert ran == {
        "vescale::start_all_gather": 2 * UNITS - 2,
        "vescale::wait_all_gather": 2 * UNITS - 2,
        "vescale::carry_all_gather": 1,
        "vescale::take_all_gather": 1,
        "vescale::start_reduce_scatter": UNITS,
        "c10d::send": 3 * UNITS - 1,
        "gloo:send": 3 * UNITS - 1,
        "c10d::recv_": 3 * UNITS - 1,
        "gloo:recv": 3 * UNITS - 1,
    }, ran


@pytest.mark.slow
@on_ranks(2)
def test_overlapped_training_is_bit_equal_to_training_that_waits_at_once():
    overlapped, waiting = (trained("eager", wire).losses for wire in ("slow", "fast"))
    _, reference = models.train_unsharded(models.Uneven, models.batches(3, 11))
    assert overlapped == waiting == reference


@pytest.mark.slow
@on_ranks(2)
def test_ranks_that_would_schedule_differently_follow_the_first_of_them():
    """As with batches of different sizes, one of which hides more than the other."""
    torch._dynamo.reset()
    frugal = mock.patch.object(fitting, "find_schedule", lambda tasks, limit: find_schedule(tasks, least_peak(tasks)))
    model = vc.fully_shard(models.build(models.deep))
    batch = models.batches(1, 11)[0]
    options = {"lowering": "eager", "cluster": models.SLOW_WIRE}
    with frugal if dist.get_rank() else contextlib.nullcontext():
        (graph,) = vc.explain(model, *batch, options=options).graphs
        own = [part.schedule for part in graph.parts.values()]
        schedules = [own, own]
        dist.all_gather_object(schedules, own)
        assert schedules[0] == schedules[1]
        torch.compile(model, backend="vescale", options=options)(*batch).backward()


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_alone_compiles_again_for_a_longer_batch_without_another_schedule():
    torch._dynamo.reset()
    model = vc.fully_shard(models.Uneven(3))
    call = torch.compile(model, backend="vescale", options={"lowering": "eager", "deadline": 20}, dynamic=False)
    call(*models.batches(1, 11)[0]).backward()
    before, now = (2, 5), (3, 6) if dist.get_rank() else (2, 5)
    with mock.patch.object(fitting, "find_schedule", lambda tasks, limit: find_schedule(tasks, least_peak(tasks))):
        for shape in (before, now):
            call(*models.batches(1, 11, shape=shape)[0]).backward()


class Counting(nn.Module):
    """Computes with the number of its tokens, which Python multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale, self.out = nn.LayerNorm(16), nn.Parameter(torch.ones(16)), nn.Linear(16, 16)

    def forward(self, x):
        tokens = x.shape[0] * x.shape[1]
        scaled = self.norm(x).reshape(tokens, x.shape[2]) * self.scale + tokens * 0.5
        places = torch.arange(x.shape[1]).view(1, -1, 1) / x.shape[1]
        return x + self.out(scaled.view(x.shape) - scaled.mean(0)).relu() * places


class CountingLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Counting() for _ in range(3)), nn.LayerNorm(16)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().sum()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        layers = (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().sum()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "now"), [(CountingLayers, (3, 9)), (Wide, (0, 8))])
@on_ranks(2)
def test_so_it_does_where_its_graph_is_cut_otherwise(make, now):
    """By sizes that it computes, or because other kernels are left of an empty batch."""
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(make))
    backend = functools.partial(vescale, options={"deadline": 20}, generate_code=False)
    call = torch.compile(model, backend=backend)
    call(torch.ones(2, 8, 16)).backward()
    with mock.patch.object(fitting, "find_schedule", lambda tasks, limit: find_schedule(tasks, least_peak(tasks))):
        for shape in ((2, 8), now if dist.get_rank() else (2, 8)):
            call(torch.ones(*shape, 16)).backward()


@pytest.mark.slow
def test_kernels_that_do_not_allow_the_order_of_the_ranks_are_divided(monkeypatch):
    tasks, agreed_order = [], Agreed.of

    def of(self, graph):
        tasks.append(len(graph.compute))
        if len(tasks) % 2:
            raise ScheduleError("ready for a launch at position 1, and due at position 0")
        return agreed_order(self, graph)

    monkeypatch.setattr(Agreed, "of", of)
    torch._dynamo.reset()
    with fake_world(2):
        model = vc.fully_shard(models.build(CountingLayers))
        call = torch.compile(model, backend=functools.partial(vescale, generate_code=False))
        call(torch.ones(2, 8, 16)).backward()
    assert tasks[0] < tasks[1] and tasks[2] < tasks[3]
