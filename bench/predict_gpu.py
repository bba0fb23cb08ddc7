"""Predicted and measured steps of one rank on a GPU, side by side: ``python bench/predict_gpu.py``.

The rank is one of ``--world`` whose collectives send nothing, so that a step is its computation, and what its GPU waits
for the host to launch. It is compiled and predicted for links on which nothing takes time, too. Both are predicted

- by the cost model's table of devices (``--cluster``), from datasheets, two shares of their peaks that are assumed, and
  assumed times of its host;
- by a calibration of this GPU, made here: one large product in each dtype, one copy, launches, and what its host takes
  for a kernel of generated code. What the host takes for a collective, which several ranks would have to measure, and
  for parameters stays the table's.

Models are the examples', and with ``--layers`` the first layers of published ones, as Hugging Face has them, whose
activations are checkpointed (see published.py). Of a measured step a profile tells how long its GPU computes; the rest
it waits for launches. Memory is that of tensors, beside what was planned.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import nothing
import torch
import torch.distributed as dist
from options import check_folder, count, some_of, write_record
from published import CONFIGS, build, shard
from report import header, row
from states import state_bytes
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from workload import LEARNING_RATE, MODELS, Workload

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.cost import PRESETS, Cluster, Link
from vescale_compile.cost.calibrate import calibrate
from vescale_compile.report import GraphReport

_WARMUP = 3
_NO_TIME = 1e21  # bytes/s
_HEADINGS = (
    "model",
    "measured ms",
    "of it GPU busy",
    "optimizer",
    "by the table ms",
    "error",
    "by calibration ms",
    "error",
    "tensors GB",
    "planned GB",
    "error",
)


@dataclass(frozen=True)
class Cell:
    """One model. Times in seconds, memory in bytes with the optimizer's states.

    Attributes:
        name: of the model.
        steps: forward, backward and optimizer, each from a device at rest to a device at rest.
        optimizer: its part, median, from a device at rest to a device at rest: it takes less of a step, where
            the host launches it while the device computes gradients.
        busy: of a profiled step, in which kernels run on the stream that computes.
        by_table, by_calibration: predicted computation of a step, the optimizer's with it, and waiting for launches.
        peak: of tensors in a step.
        planned: the same before the first one.
    """

    name: str
    steps: list[float]
    optimizer: float
    busy: float
    by_table: float
    by_calibration: float
    peak: int
    planned: int

    @property
    def measured(self) -> float:
        """The median step."""
        return statistics.median(self.steps)


def main() -> int:
    """Prints the table."""
    args = _arguments()
    described = PRESETS[args.cluster](args.world)
    within, between = (Link(link.name, _NO_TIME, 0.0) for link in (described.within, described.between))
    table = replace(described, within=within, between=between, start=0.0)
    calibrated = replace(table, device=calibrate("cuda").device)
    print(f"calibrated: {calibrated.device}", file=sys.stderr, flush=True)
    cells = []
    for name in args.models:
        cells.append(_cell(name, args, table, calibrated))
        print(_line(cells[-1]), file=sys.stderr, flush=True)
    print(f"{torch.cuda.get_device_name()}; {args.batch} x {args.seq} tokens; torch {torch.__version__}\n")
    print("\n".join([*header(_HEADINGS), *map(_line, cells)]))
    if args.json is not None:
        devices = {"table": asdict(table.device), "calibrated": asdict(calibrated.device)}
        how = {"world": args.world, "batch": args.batch, "seq": args.seq, "layers": args.layers}
        write_record(args.json, {**how, **devices, "cells": [asdict(cell) for cell in cells]})
    return 0


def _cell(name: str, args: argparse.Namespace, table: Cluster, calibrated: Cluster) -> Cell:
    torch.manual_seed(0)
    make, batch = _made(name, args)
    shapes = {key: value.to("meta") for key, value in batch.items()}

    def predicted(cluster: Cluster) -> float:
        found = vc.simulate(make("meta"), **shapes, cluster=cluster, world_size=args.world, shard=shard)
        return found.step_seconds

    by_table, by_calibration = predicted(table), predicted(calibrated)
    nothing.join(args.world)
    try:
        return _measured(name, make, batch, table, args.steps, by_table, by_calibration)
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def _made(name: str, args: argparse.Namespace) -> tuple[Callable[[str], nn.Module], dict[str, Any]]:
    """What makes a model on a device, and a batch on the GPU."""
    if name in MODELS:
        workload = Workload(name, args.batch, args.seq, "bf16", "cuda", 0)
        tokens, labels = workload.build_batch(0)
        return lambda device: replace(workload, device=device).build_model(), {"tokens": tokens, "labels": labels}
    tokens = torch.randint(0, 1000, (args.batch, args.seq), device="cuda")
    return functools.partial(build, name, args.layers), {"input_ids": tokens, "labels": tokens}


def _measured(
    name: str,
    make: Callable[[str], nn.Module],
    batch: dict[str, Any],
    cluster: Cluster,
    steps: int,
    by_table: float,
    by_calibration: float,
) -> Cell:
    reports: list[GraphReport] = []
    before = torch.cuda.memory_allocated()
    model = shard(make("cuda"))
    backend = functools.partial(vescale, options={"cluster": cluster}, on_compiled=reports.append)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def gradients() -> None:
        found: Any = compiled(**batch)
        (found if isinstance(found, Tensor) else found.loss).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        gradients()
        update()

    def update_alone() -> float:
        gradients()
        return _seconds(update)

    for _ in range(_WARMUP):
        step()
    torch.cuda.reset_peak_memory_stats()
    taken = [_seconds(step) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() - before
    updates = [update_alone() for _ in range(steps)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return Cell(
        name,
        taken,
        statistics.median(updates),
        _busy(profiler),
        by_table,
        by_calibration,
        peak,
        max(report.peak_bytes for report in reports) + state_bytes([optimizer]),
    )


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _busy(profiler: profile) -> float:
    """Seconds in which kernels run on the stream that computes, which is the busiest."""
    streams: Counter[int] = Counter()
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            streams[event.device_resource_id] += event.time_range.elapsed_us()
    return max(streams.values(), default=0) / 1e6


def _line(cell: Cell) -> str:
    figures = [f"{1e3 * cell.measured:.1f}", f"{1e3 * cell.busy:.1f}", f"{1e3 * cell.optimizer:.1f}"]
    for seconds in (cell.by_table, cell.by_calibration):
        figures += [f"{1e3 * seconds:.1f}", f"{100 * (seconds / cell.measured - 1):+.1f} %"]
    figures += [f"{cell.peak / 1e9:.2f}", f"{cell.planned / 1e9:.2f}", f"{100 * (cell.planned / cell.peak - 1):+.1f} %"]
    return row([cell.name, *figures])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*MODELS, *CONFIGS]
    parser.add_argument(
        "--models",
        type=some_of("model", known),
        default=["125M", "1B"],
        metavar="NAME,...",
        help=f"of {', '.join(known)} (125M,1B)",
    )
    parser.add_argument("--layers", type=count, help="of published models, all if not given")
    parser.add_argument("--world", type=count, default=8, help="ranks (%(default)s)")
    parser.add_argument("--cluster", choices=list(PRESETS), default="h200", help="(%(default)s)")
    parser.add_argument("--batch", type=count, default=1, help="sequences of a rank (%(default)s)")
    parser.add_argument("--seq", type=count, default=4096, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--steps", type=count, default=7, help="timed steps (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU on this machine; bench/predict.py is for CPUs")
    check_folder(parser, "--json", args.json)
    return args


if __name__ == "__main__":
    sys.exit(main())
