"""Measuring this machine: what comes out is complete, alike on all ranks, and fits what went in."""

import pytest
import torch
from ranks import run_on_ranks

from vescale_compile.cost import Calibration, collective_cost, wire_cluster
from vescale_compile.cost.calibrate import calibrate, fit


def test_a_fit_finds_latency_and_bandwidth() -> None:
    sizes = [10, 100, 1000, 10000]
    assert fit(sizes, [0.5 + size / 250 for size in sizes]) == pytest.approx((0.5, 250))


def test_a_fit_has_no_negative_latency() -> None:
    latency, bandwidth = fit([10, 1000], [0.001, 1.0])
    assert (latency, bandwidth) == (0.0, 1000)


def test_without_a_process_group_the_device_alone_is_measured() -> None:
    found = calibrate(dtypes=[torch.float32])
    assert found.device.peak_flops.keys() == {"float32"}
    assert found.device.seconds(1e9, 0, "float32") > found.device.launch_overhead > 0
    assert (found.ranks, found.collectives) == (1, {})


def measured() -> Calibration:
    return calibrate(dtypes=[torch.float32])


@pytest.mark.slow
def test_ranks_measure_their_collectives_and_agree() -> None:
    first, second = run_on_ranks(2, measured)
    assert first == second
    assert first.ranks == 2
    assert first.collectives.keys() == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(0 <= each.load < 1 for each in first.collectives.values())
    where = wire_cluster(first.device, 2, 1.0, measured=first.collectives)
    assert 0 < collective_cost(where, "all_gather", 1 << 20).seconds < 10


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"device": "tpu"}, "device is 'tpu'; give 'cpu' or 'cuda'"), ({"dtypes": []}, "give at least one dtype")],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        calibrate(**arguments)  # type: ignore[arg-type]
