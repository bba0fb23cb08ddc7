"""Measures the device and the collectives of this machine, for the cost model: only when it is asked to.

    calibration = calibrate()                 # each rank alike, if there is a process group
    calibration.save("this_machine.json")     # on one rank; later: Calibration.load("this_machine.json")

It takes seconds, on a GPU or over a slow network up to a minute; other work on the machine falsifies it. Nothing in
compilation calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale_compile.cost.calibrate_collectives import Slowest, calibrate_collectives, synchronize
from vescale_compile.cost.calibrate_host import seconds_of_host
from vescale_compile.cost.calibration import Calibration
from vescale_compile.cost.devices import Device
from vescale_compile.runtime.ops import gives_float32_products

# On a CPU small enough that some repetitions run without being interrupted.
_MATRIX = {"cpu": 512, "cuda": 8192}  # rows and columns
_COPY_BYTES = {"cpu": 1 << 25, "cuda": 1 << 30}
_REPEATS = 15  # of what takes milliseconds
_LAUNCHES, _PRODUCTS = 200, 8  # a GPU computes the products for longer than its host takes to launch the others


def calibrate(
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Calibration:
    """Measures matrix products, memory bandwidth and launches, and collectives, if there is a process group.

    Then every rank must call this, at the same time: all measure at once, and all get the figures of the slowest. The
    group's own timeout bounds each wait.

    Args:
        device: "cpu" (with as many threads as PyTorch uses now) or "cuda" (the current device).
        dtypes: of the matrix products.

    Raises:
        ValueError: another device, or no dtypes.
    """
    if device not in _MATRIX:
        raise ValueError(f"calibrate: device is {device!r}; give 'cpu' or 'cuda'")
    if not dtypes:
        raise ValueError("calibrate: give at least one dtype")
    distributed = dist.is_initialized()
    ranks = dist.get_world_size() if distributed else 1
    agree = Slowest(device) if distributed else _itself
    kernel = [_copy_seconds(device), _launch(device), 0.0 if device == "cpu" else seconds_of_host(device)]
    *products, copy, launch, issue = agree([*(_matrix_seconds(device, dtype) for dtype in dtypes), *kernel])
    work = 2 * _MATRIX[device] ** 3
    measured = Device(
        name=f"cpu with {torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(),
        peak_flops={_name(dtype): work / product for dtype, product in zip(dtypes, products, strict=True)},
        memory_bandwidth=2 * _COPY_BYTES[device] / copy,
        memory_bytes=None if device == "cpu" else torch.cuda.get_device_properties().total_memory,
        compute_efficiency=1.0,
        bandwidth_efficiency=1.0,
        launch_overhead=launch,
        float32_products=gives_float32_products(torch.device(device)),
        issue=issue,
    )
    return Calibration(measured, ranks, calibrate_collectives(device) if ranks > 1 else {})


def _itself(seconds: list[float]) -> list[float]:
    return seconds


def _matrix_seconds(device: str, dtype: torch.dtype) -> float:
    size = _MATRIX[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return min(_times(lambda: torch.mm(a, b, out=out), device))


def _copy_seconds(device: str) -> float:
    source = torch.zeros(_COPY_BYTES[device], dtype=torch.uint8, device=device).view(torch.float32)
    target = torch.zeros_like(source)
    return min(_times(lambda: torch.mul(source, 2.0, out=target), device))


def _launch(device: str) -> float:
    """Seconds that a kernel on one element takes, of many launched one after another."""
    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            one.add_(1.0)

    if device == "cpu":
        return min(_times(launches, device)) / _LAUNCHES
    factor = torch.zeros(_MATRIX[device], _MATRIX[device], device=device, dtype=torch.bfloat16)
    product = torch.empty_like(factor)
    return min(_behind(lambda: torch.mm(factor, factor, out=product), launches) for _ in range(_REPEATS)) / _LAUNCHES


def _behind(multiply: Callable[[], object], launches: Callable[[], None]) -> float:
    """Seconds of a GPU for kernels that were all launched while it had products to compute."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for _ in range(_PRODUCTS):
        multiply()
    first.record()
    launches()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _times(run: Callable[[], Any], device: str) -> list[float]:
    run()
    times = []
    for _ in range(_REPEATS):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
