"""Measuring this machine: what comes out is complete, alike on all ranks, and fits what went in."""

from unittest import mock

import pytest
import torch
from ranks import fake_world, run_on_ranks

import vescale_compile as vc
from vescale_compile.cost import Calibration, collective_cost, operators, wire_cluster
from vescale_compile.cost import calibrate_collectives as module
from vescale_compile.cost.calibrate import calibrate
from vescale_compile.cost.calibrate_collectives import calibrate_collectives, contention, fit, together


@pytest.mark.slow
def test_compiling_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for measured in (module, operators):
        monkeypatch.setattr(measured, "time", None)
    with fake_world(2):
        model = vc.fully_shard(torch.nn.Linear(4, 2))
        assert vc.explain(model, torch.ones(3, 4)).graphs
        with pytest.raises(AttributeError):
            calibrate()


def test_a_fit_finds_latency_and_bandwidth() -> None:
    sizes = [10, 100, 1000, 10000]
    assert fit(sizes, [0.5 + size / 250 for size in sizes]) == pytest.approx((0.5, 250))


def test_a_fit_has_no_negative_latency() -> None:
    latency, bandwidth = fit([10, 1000], [0.001, 1.0])
    assert (latency, bandwidth) == (0.0, 1000)


@pytest.mark.parametrize(
    ("work", "alone", "expected"),
    [(3.0, 10.0, 6.0 + 7.0), (12.0, 10.0, 20.0 + 2.0)],
    ids=["computation ends first", "the collective ends first"],
)
def test_computation_and_a_collective_slow_each_other_while_both_run(
    work: float, alone: float, expected: float
) -> None:
    assert together(work, alone, load=0.5, stretch=2.0) == pytest.approx(expected)


@pytest.mark.parametrize(("load", "stretch"), [(0.0, 1.0), (0.3, 1.0), (0.1, 2.5), (0.4, 1.5)])
def test_what_slows_computation_and_collective_is_found_from_both_together(load: float, stretch: float) -> None:
    short, long = (together(work, 10.0, load, stretch) for work in (5.0, 40.0))
    assert contention(10.0, 5.0, short, 40.0, long) == pytest.approx((load, stretch))


def test_both_together_are_not_taken_to_last_longer_than_one_after_the_other() -> None:
    load, stretch = contention(10.0, 5.0, 25.0, 40.0, 70.0)
    assert together(5.0, 10.0, load, stretch) <= 15.0 + 1e-9
    assert together(40.0, 10.0, load, stretch) <= 50.0 + 1e-9


class Clocked(module._Bench):
    """Its clock stands but for a launch, a collective and products, of 2, 10 and 1 seconds."""

    def __init__(self) -> None:
        self.device, self.agree = "cpu", lambda seconds: seconds
        self.seconds = self.arrival = 0.0

    def start(self) -> "Clocked":
        self.arrival = self.seconds + 10.0
        self.seconds += 2.0
        return self

    def wait(self) -> None:
        self.seconds = max(self.seconds, self.arrival)

    def _multiply(self, products: int) -> None:
        self.seconds += products

    def _now(self) -> float:
        return self.seconds


def test_a_launch_is_measured_apart_from_what_follows_it() -> None:
    bench = Clocked()
    assert bench._after_a_pause(bench.start, 10.0) == [2.0, 10.0]


def test_what_a_launch_takes_is_no_load() -> None:
    bench = Clocked()
    with mock.patch.object(module.dist, "barrier"):
        assert bench._contention(bench.start, 10.0, 2.0) == (0.0, 1.0)
        assert bench._contention(bench.start, 10.0, 0.0) != (0.0, 1.0)


def test_without_a_process_group_the_device_alone_is_measured() -> None:
    found = calibrate(dtypes=[torch.float32])
    assert found.device.peak_flops.keys() == {"float32"}
    assert found.device.seconds(1e9, 0, "float32") > found.device.launch_overhead > found.device.issue == 0
    assert (found.ranks, found.collectives) == (1, {})


def measured() -> Calibration:
    """Of small messages, few times."""
    with mock.patch.multiple(module, _COLLECTIVE_BYTES={"cpu": (1 << 14, 1 << 16)}, _BATCH_BYTES=1 << 18, _MOST=5):
        return calibrate(dtypes=[torch.float32])


@pytest.mark.slow
def test_ranks_measure_their_collectives_and_agree() -> None:
    first, second = run_on_ranks(2, measured)
    assert first == second
    assert first.ranks == 2
    assert first.collectives.keys() == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert all(0 <= each.load < 1 <= each.stretch for each in first.collectives.values())
    assert all(each.latency + (1 << 16) / each.bandwidth + each.wakeup < 1 for each in first.collectives.values())
    assert all(0 < each.launch < 1 and each.call == 0 for each in first.collectives.values())
    where = wire_cluster(first.device, 2, 1.0, measured=first.collectives)
    assert 0 < collective_cost(where, "all_gather", 1 << 20).seconds < 10


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"device": "tpu"}, "device is 'tpu'; give 'cpu' or 'cuda'"), ({"dtypes": []}, "give at least one dtype")],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        calibrate(**arguments)  # type: ignore[arg-type]


def test_a_kind_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no collective broadcast; there are all_gather, "):
        calibrate_collectives(kinds=("all_gather", "broadcast"))
