"""Predicted and measured step times side by side: ``python bench/predict.py``, as root.

For each size of the example Llama, each rate of the wire and each number of hosts (one rank of one thread on each; see
wire.py) it prints the step that the compiler predicted before the first one ran, the median step measured, and the
error. What the prediction rests on is measured in the same command:

- the device: its memory, its launches, and the matrix products and attention of the models' graphs one by one, by as
  many ranks at a time as there are cores;
- the collectives of the runtime, over the wire at its rate, between all hosts, alone and beside computation, of which
  each slows the other, and how long a launch takes, in which nothing is computed;
- where there are more hosts than cores, each has its share of one: the device is that much slower;
- the optimizer's step, which is in no graph: measured apart, and added.

What is predicted is how these add up: which collectives the schedule hides behind which computation. ``--json`` keeps
the cells; with the same file a later run measures those that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import wire
from forecaster import Forecast, Forecaster
from options import check_folder, count, end_as_interrupted, rate, seconds, some_of, write_record
from processes import Ranks, RanksFailed
from worker import Job, duration
from workload import FOUR_LAYERS, Policy, Workload

from vescale_compile.cost import Cluster, Device, MeasuredCollective, wire_cluster

RATES = ("1gbit", "2gbit", "5gbit", "10gbit")
HOSTS = (2, 3, 4)
TARGET = 0.15
_UNITS = {"": 1e-9, "k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}


@dataclass(frozen=True)
class Setting:
    """One cell of the table."""

    size: str
    rate: str
    hosts: int


@dataclass(frozen=True)
class Cell:
    """What one cell measured. Times in seconds.

    Attributes:
        predicted: the step; of it ``compute`` with the device to itself, ``exposed``, ``slowdown`` by collectives and
            their launches, and ``optimizer``, which is measured.
        communication: of all collectives, each with the wire to itself.
        measured: median step; ``steps`` are all that were timed.
    """

    size: str
    rate: str
    hosts: int
    parameters: int
    predicted: float
    compute: float
    communication: float
    exposed: float
    slowdown: float
    optimizer: float
    measured: float
    steps: list[float]

    @property
    def error(self) -> float:
        """By what share the prediction exceeds the measurement."""
        return self.predicted / self.measured - 1

    @classmethod
    def of(cls, setting: Setting, forecast: Forecast, steps: Sequence[float]) -> Cell:
        parts = (forecast.forward, forecast.backward)
        return cls(
            setting.size,
            setting.rate,
            setting.hosts,
            forecast.parameters,
            forecast.seconds,
            sum(part.compute for part in parts),
            sum(part.communication for part in parts),
            sum(part.exposed for part in parts),
            sum(part.slowdown for part in parts),
            forecast.optimizer,
            statistics.median(steps),
            list(steps),
        )


def main() -> int:
    """Measures those cells asked for that are missing, and prints the table of all asked for; 1 if a cell failed."""
    args = _arguments()
    end_as_interrupted()
    if (missing := wire.what_is_missing()) is not None:
        print(f"Skipped: {missing}.")
        return 0
    how = {"batch": args.batch, "seq": args.seq, "policy": str(args.policy), "torch": torch.__version__}
    cells = _read(args.json, how)
    wanted = [Setting(*each) for each in itertools.product(args.sizes, args.rates, args.hosts)]
    done = {Setting(cell.size, cell.rate, cell.hosts) for cell in cells}
    missing_cells = [setting for setting in wanted if setting not in done]
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        bench = _Bench(args, Path(folder), failures)
        for cell in bench.measure(missing_cells) if missing_cells else ():
            cells.append(cell)
            _say(
                f"{cell.size}, {cell.rate}, {cell.hosts} hosts: predicted {cell.predicted:.3f} s, "
                f"measured {cell.measured:.3f} s, {100 * cell.error:+.0f} %"
            )
            _write(args.json, how, cells)
    print(table([cell for cell in cells if Setting(cell.size, cell.rate, cell.hosts) in wanted]))
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bool(failures))


class _Bench:
    """The machinery of a run; one set of processes lives at a time."""

    def __init__(self, args: argparse.Namespace, folder: Path, failures: list[str]) -> None:
        self.args, self.folder, self.failures = args, folder, failures
        self.cores = len(os.sched_getaffinity(0))

    def measure(self, settings: Sequence[Setting]) -> Iterator[Cell]:
        """Measures cell after cell; one that fails ends those of its number of hosts."""
        device = self._device(tuple(dict.fromkeys(setting.size for setting in settings)))
        for hosts, group in itertools.groupby(sorted(settings, key=_order), key=lambda setting: setting.hosts):
            with contextlib.ExitStack() as stack:
                joined = stack.enter_context(wire.wire(settings[0].rate, hosts))
                ranks = Ranks(self._job(f"{hosts}-hosts", hosts, joined), Forecaster)
                stack.callback(ranks.close)
                try:
                    ranks.ask("join")
                    yield from self._on_hosts(ranks, device, joined, list(group))
                    ranks.ask("leave")
                except RanksFailed as failure:
                    self.failures.append(f"{hosts} hosts FAILED:\n{failure}")

    def _device(self, sizes: tuple[str, ...]) -> Device:
        """Of as many ranks as find a core each; the mean of what they measure."""
        ranks = Ranks(self._job("device", min(self.cores, max(self.args.hosts)), None), Forecaster)
        try:
            _say("measuring the device")
            devices: list[Device] = ranks.ask("measure_device", tuple(FOUR_LAYERS[size] for size in sizes))
        finally:
            ranks.close()
        first = devices[0]
        operators = {
            key: statistics.fmean(each.operators[key] for each in devices if key in each.operators)
            for key in first.operators
        }
        return replace(first, operators=operators)

    def _on_hosts(self, ranks: Ranks, device: Device, joined: wire.Wire, settings: list[Setting]) -> Iterator[Cell]:
        contending = max(1.0, len(joined.hosts) / self.cores)
        for bandwidth, group in itertools.groupby(settings, key=lambda setting: setting.rate):
            joined = joined.at(bandwidth)
            _say(f"measuring the collectives of {len(joined.hosts)} hosts at {bandwidth}")
            measured: dict[str, MeasuredCollective] = ranks.ask("measure_collectives")[0]
            for kind, each in measured.items():
                _say(
                    f"  {kind}: {1e3 * each.latency:.2f} ms and {each.bandwidth / 1e6:.0f} MB/s, "
                    f"{1e3 * each.wakeup:.2f} ms more after a pause, {1e3 * each.launch:.2f} ms to launch; "
                    f"computation beside it "
                    f"loses {100 * each.load:.0f} %, and it takes {each.stretch:.2f} times as long"
                )
            cluster = cluster_of(device, len(joined.hosts), bandwidth, measured, contending)
            for setting in group:
                forecast: Forecast = ranks.ask("prepare", FOUR_LAYERS[setting.size], cluster)[0]
                yield Cell.of(setting, forecast, self._steps(ranks))

    def _steps(self, ranks: Ranks) -> list[float]:
        taken: list[float] = []
        until = time.monotonic() + self.args.seconds
        while len(taken) < 3 or (len(taken) < self.args.steps and time.monotonic() < until):
            taken.append(duration(ranks.ask("step")))
        return taken

    def _job(self, start: str, ranks: int, joined: wire.Wire | None) -> Job:
        # All sizes have the vocabulary of this one, which batches are made of.
        workload = Workload("30M", self.args.batch, self.args.seq, "fp32", "cpu", 0)
        return Job(
            "vescale",
            self.args.policy,
            workload,
            ranks,
            None,
            1,
            str(self.folder),
            start,
            joined,
            self.args.deadline,
            own_cache=False,
        )


def cluster_of(
    device: Device, hosts: int, rate: str, measured: dict[str, MeasuredCollective], contending: float
) -> Cluster:
    """What the compiler predicts for.

    Args:
        device: of a host with a core to itself.
        hosts: one rank on each.
        rate: of the wire.
        measured: collectives between these hosts, over that wire.
        contending: hosts for each core, at least 1.
    """
    return wire_cluster(device.shared(contending), hosts, gigabits(rate), measured=measured)


def gigabits(rate: str) -> float:
    """Gbit/s of a rate as ``tc`` reads it."""
    number = rate.lower().removesuffix("bit").rstrip("kmgt")
    return float(number) * _UNITS[rate.lower().removesuffix("bit")[len(number) :]]


def table(cells: Sequence[Cell]) -> str:
    """Markdown, a line for each cell, and how many are within the target."""
    lines = [
        "| size | wire | hosts | predicted ms | measured ms | error | computation | communication | exposed "
        "| optimizer |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell in sorted(cells, key=lambda cell: (cell.parameters, cell.hosts, gigabits(cell.rate))):
        times = (cell.compute, cell.communication, cell.exposed, cell.optimizer)
        lines.append(
            f"| {cell.size} | {cell.rate} | {cell.hosts} | {1e3 * cell.predicted:.0f} | {1e3 * cell.measured:.0f} | "
            f"{100 * cell.error:+.1f} % | {' | '.join(f'{1e3 * seconds:.0f}' for seconds in times)} |"
        )
    within = sum(abs(cell.error) <= TARGET for cell in cells)
    lines.append("")
    lines.append(f"{within} of {len(cells)} cells are within {100 * TARGET:.0f} %.")
    return "\n".join(lines)


def _order(setting: Setting) -> tuple[int, float, str]:
    return setting.hosts, gigabits(setting.rate), setting.size


def _read(path: Path | None, how: dict[str, Any]) -> list[Cell]:
    """The cells of an earlier run with the same settings; ends the program if the file is of another."""
    if path is None or not path.exists():
        return []
    kept = json.loads(path.read_text())
    if kept["how"] != how:
        raise SystemExit(
            f"predict.py: {path} was measured with {kept['how']}, and this run has {how}: name another file"
        )
    return [Cell(**cell) for cell in kept["cells"]]


def _write(path: Path | None, how: dict[str, Any], cells: Sequence[Cell]) -> None:
    if path is not None:
        write_record(path, {"how": how, "cells": [asdict(cell) for cell in cells]})


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        type=some_of("size", FOUR_LAYERS),
        default=list(FOUR_LAYERS),
        metavar="NAME,...",
        help=f"of {', '.join(FOUR_LAYERS)}",
    )
    parser.add_argument("--rates", type=_rates, default=list(RATES), metavar="RATE,...", help=f"({','.join(RATES)})")
    parser.add_argument("--hosts", type=_hosts, default=list(HOSTS), metavar="N,...", help="2 or more (2,3,4)")
    parser.add_argument("--policy", type=Policy, choices=[Policy.RESHARD, Policy.KEEP], default=Policy.RESHARD)
    parser.add_argument("--batch", type=count, default=1, help="sequences of a rank (%(default)s)")
    parser.add_argument("--seq", type=count, default=64, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--steps", type=count, default=7, help="timed steps of a cell (%(default)s)")
    parser.add_argument("--seconds", type=seconds, default=10.0, metavar="S", help="but no new one after (%(default)s)")
    parser.add_argument("--deadline", type=seconds, default=900.0, metavar="S", help="of any one order (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the cells, and measure those that are missing")
    args = parser.parse_args()
    check_folder(parser, "--json", args.json)
    return args


def _rates(value: str) -> list[str]:
    return list(dict.fromkeys(map(rate, value.split(","))))


def _hosts(value: str) -> list[int]:
    numbers = [int(each) if each.isdecimal() else 0 for each in value.split(",")]
    if min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"{value}: give numbers of 2 or more")
    return list(dict.fromkeys(numbers))


if __name__ == "__main__":
    sys.exit(main())
