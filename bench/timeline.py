"""Draws a training step of rank 0, ours as predicted and as measured, and of peers: ``python bench/timeline.py``.

Two hosts with a wire between them (see wire.py), as root. Of a few steps of each system that of the median duration is
drawn, in two lanes on one time axis:

- computation: operators and generated kernels of the main thread in PyTorch's profiler, without launches of
  collectives and waits for them. Behind them, paler, when the main thread was awake: it launches too, and runs Python.
  Where it sleeps it waits for the wire, or for the other rank.
- the wire: when the host's interface sent or received. Gloo moves data on threads of its own, which the profiler does
  not see alike for all systems; so a thread beside the ranks reads the interface's counters every few milliseconds,
  and the main thread's state, which on CPUs tells a wait from a launch: launching is work, as copying to the wire is.

Above them is what the compiler predicted of ours, for the device and the collectives as measured just before, as in
predict.py; the optimizer's step is measured. Of the communication that could be hidden two shares are printed: what
lies beneath computation, and what the main thread did not sleep through. ``--json`` keeps all spans, in seconds from
the start of the step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import wire
from forecaster import Forecast
from options import (
    PICTURES,
    check_folder,
    check_picture,
    count,
    end_as_interrupted,
    rate,
    seconds,
    some_of,
    write_record,
)
from predict import cluster_of, gigabits
from processes import Ranks
from systems import OURS, SYSTEMS
from traced import Spans, Trace, TracedForecaster, TracedTrainer, merged
from worker import Job
from workload import FOUR_LAYERS, Policy, Workload

from vescale_compile.examples import llama

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PEERS = ("fsdp2-compile", "simplefsdp")
HOSTS = 2
DENSE = llama.SIZES | FOUR_LAYERS
_WARMUP = 3
_SAMPLE_S = 2e-3
_BUSY = 0.02  # of the rate, below which a wire is taken to rest
_COMPUTE, _WIRE, _UPDATE, _AWAKE = "#4c72b0", "#dd8452", "#8c9bb5", "#cfd8e8"


@dataclass
class Lane:
    """A step of one system."""

    name: str
    seconds: float
    computation: Spans
    wire: Spans
    optimizer: Spans = field(default_factory=list)
    awake: Spans = field(default_factory=list)
    """of a measured step, when its main thread did not sleep"""

    @property
    def hidden(self) -> float:
        """Of what could be hidden, communication beneath computation or the other way round, the share that is; all of
        nothing."""
        return _hidden([*self.computation, *self.optimizer], self.wire)

    @property
    def unwaited(self) -> float:
        """The same, where launches and Python between operators hide communication too."""
        return _hidden([*self.computation, *self.optimizer, *self.awake], self.wire)


def main() -> int:
    """Measures, and writes the picture."""
    args = _arguments()
    end_as_interrupted()
    if (missing := wire.what_is_missing()) is not None:
        print(f"Skipped: {missing}.")
        return 0
    workload = Workload(args.model, 1, args.seq, "fp32", "cpu", 0)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, wire.wire(args.wire, HOSTS) as joined:

        def job(system: str) -> Job:
            home = Path(folder, system)
            home.mkdir(exist_ok=True)
            return Job(
                system,
                args.policy,
                workload,
                HOSTS,
                None,
                1,
                str(home),
                "once",
                joined,
                args.deadline,
                own_cache=False,
            )

        lanes = _ours(job, args)
        for system in args.peers:
            print(f"{system}: building and warming up", file=sys.stderr, flush=True)
            ranks = Ranks(job(system), TracedTrainer)
            try:
                ranks.ask("build")
                for _ in range(_WARMUP):
                    ranks.ask("step")
                lanes.append(median(_traced(system, ranks, args.wire) for _ in range(args.steps)))
            finally:
                ranks.close()
    setting = f"{args.model}, {args.policy}, {args.seq} tokens, two hosts, {args.wire}/s between them; rank 0"
    draw(lanes, setting).savefig(args.out, dpi=150)
    if args.json is not None:
        lines = [asdict(lane) | {"hidden": lane.hidden, "unwaited": lane.unwaited} for lane in lanes]
        write_record(args.json, {"setting": setting, "lanes": lines})
    for lane in lanes:
        computation, busy = (1e3 * _total(merged(spans)) for spans in (lane.computation, lane.wire))
        print(
            f"{lane.name}: {1e3 * lane.seconds:.0f} ms, computation {computation:.0f} ms, wire busy {busy:.0f} ms, "
            f"{100 * lane.hidden:.0f} % of the shorter beneath the longer, {100 * lane.unwaited:.0f} % not waited for"
        )
    print(f"wrote {args.out}")
    return 0


def _ours(job: Callable[[str], Job], args: argparse.Namespace) -> list[Lane]:
    """What is predicted of our step, and the step."""
    print(f"{OURS}: measuring the device and the collectives, building and warming up", file=sys.stderr, flush=True)
    ranks = Ranks(job(OURS), TracedForecaster)
    config = DENSE[args.model]
    try:
        device = ranks.ask("measure_device", (config,))[0]
        ranks.ask("join")
        contending = max(1.0, HOSTS / len(os.sched_getaffinity(0)))
        cluster = cluster_of(device, HOSTS, args.wire, ranks.ask("measure_collectives")[0], contending)
        forecast: Forecast = ranks.ask("prepare", config, cluster)[0]
        return [predicted(forecast), median(_traced(OURS, ranks, args.wire) for _ in range(args.steps))]
    finally:
        ranks.close()


def median(lanes: Iterable[Lane]) -> Lane:
    """Of an even number, the faster of the two in the middle."""
    ordered = sorted(lanes, key=lambda lane: lane.seconds)
    return ordered[(len(ordered) - 1) // 2]


def predicted(forecast: Forecast) -> Lane:
    """The backward begins where the forward ends, and the optimizer's step where the backward has computed and
    launched."""
    lane = Lane(f"{OURS}, predicted", forecast.seconds, [], [])
    start = 0.0
    for part in (forecast.forward, forecast.backward):
        lane.computation += [(start + span.start, start + span.stop) for span in part.computation]
        lane.wire += [(start + span.start, start + span.stop) for span in part.transfers]
        start += part.seconds
    start -= forecast.backward.tail
    lane.optimizer.append((start, start + forecast.optimizer))
    return lane


def _traced(name: str, ranks: Ranks, rate: str) -> Lane:
    observer = Observer(ranks.processes[0].pid)
    with observer:
        traces: list[Trace] = ranks.ask("trace")
    trace = traces[0]
    busy = clipped(busy_spans(observer.sent, _BUSY * gigabits(rate) * 1e9 / 8), trace.start, trace.stop)
    awake = clipped(awake_spans(observer.states), trace.start, trace.stop)
    return Lane(name, trace.stop - trace.start, trace.computation, busy, awake=awake)


class Observer:
    """Watches a process while it is entered.

    Attributes:
        sent: monotonic times, and the bytes that had then gone over its wire, both ways.
        states: monotonic times, and the state of its main thread: one letter, R for running or ready to.
    """

    def __init__(self, pid: int) -> None:
        self.sent: list[tuple[float, int]] = []
        self.states: list[tuple[float, str]] = []
        self._process = Path(f"/proc/{pid}")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            lines = Path(self._process, "net", "dev").read_text().splitlines()
            line = next(line for line in lines if wire.INTERFACE in line)
            fields = line.partition(":")[2].split()  # proc(5): received bytes first, sent bytes ninth
            self.sent.append((time.monotonic(), int(fields[0]) + int(fields[8])))
            stat = Path(self._process, "task", self._process.name, "stat").read_text()
            self.states.append((time.monotonic(), stat.rpartition(")")[2].split()[0]))  # after the name, in brackets


def busy_spans(samples: Sequence[tuple[float, int]], least: float) -> Spans:
    """The times between samples at which more than ``least`` bytes a second went by, neighbours joined."""
    pairs = itertools.pairwise(samples)
    return merged([(start, stop) for (start, old), (stop, new) in pairs if new - old > least * (stop - start)])


def awake_spans(states: Sequence[tuple[float, str]]) -> Spans:
    """The times up to samples at which a thread ran or was ready to, from the samples before; neighbours joined."""
    return merged([(start, stop) for (start, _), (stop, state) in itertools.pairwise(states) if state == "R"])


def clipped(spans: Spans, start: float, stop: float) -> Spans:
    """What of the spans lies between two times, counted from the first."""
    inside = [(max(a, start) - start, min(b, stop) - start) for a, b in spans]
    return [(a, b) for a, b in inside if b > a]


def draw(lanes: Sequence[Lane], setting: str) -> Figure:
    """One panel for each lane, all over one time axis."""
    from matplotlib.figure import Figure  # the command line says so where it is missing

    figure = Figure(figsize=(11.0, 1.0 + 1.1 * len(lanes)), layout="constrained")
    figure.suptitle(setting, fontsize=9)
    panels = figure.subplots(len(lanes), 1, sharex=True, squeeze=False)
    for (axes,), lane in zip(panels, lanes, strict=True):
        _bars(axes, lane.awake, 1, _AWAKE)
        _bars(axes, lane.computation, 1, _COMPUTE)
        _bars(axes, lane.optimizer, 1, _UPDATE)
        _bars(axes, lane.wire, 0, _WIRE)
        axes.set_yticks([0.4, 1.4], ["wire", "computation"], fontsize=8)
        axes.set_title(f"{lane.name}: {1e3 * lane.seconds:.0f} ms", loc="left", fontsize=9)
        axes.axvline(1e3 * lane.seconds, color="black", linewidth=0.8)
        axes.tick_params(axis="x", labelsize=8)
    panels[-1][0].set_xlabel("ms from the start of the step", fontsize=8)
    return figure


def _bars(axes: Axes, spans: Spans, row: int, color: str) -> None:
    axes.broken_barh([(1e3 * a, 1e3 * (b - a)) for a, b in spans], (row, 0.8), facecolors=color)


def _hidden(work: Spans, transfers: Spans) -> float:
    """The share of the shorter that lies beneath the longer; all of nothing."""
    busy, wire = merged(work), merged(transfers)  # predicted gathers and reductions share the wire
    shorter = min(_total(busy), _total(wire))
    return _overlap(busy, wire) / shorter if shorter else 1.0


def _total(spans: Spans) -> float:
    return sum(stop - start for start, stop in spans)


def _overlap(some: Spans, others: Spans) -> float:
    """Seconds that lie in spans of both; those of each do not overlap."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"the picture ({', '.join(PICTURES)})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the spans, and what is hidden")
    known = [name for name in SYSTEMS if name != OURS]
    parser.add_argument(
        "--peers", type=some_of("peer", known), default=PEERS, metavar="NAME,...", help=f"({','.join(PEERS)})"
    )
    parser.add_argument("--wire", type=rate, default="2gbit", metavar="RATE", help="(%(default)s)")
    parser.add_argument("--model", choices=DENSE, default="28M", help="(%(default)s)")
    parser.add_argument("--policy", type=Policy, choices=[Policy.RESHARD, Policy.KEEP], default=Policy.RESHARD)
    parser.add_argument("--seq", type=count, default=64, help="tokens of a rank (%(default)s)")
    parser.add_argument("--steps", type=count, default=5, help="of each system, of which one is drawn (%(default)s)")
    parser.add_argument("--deadline", type=seconds, default=900.0, metavar="S", help="of any one order (%(default)s)")
    args = parser.parse_args()
    check_picture(parser, "--out", args.out)
    check_folder(parser, "--json", args.json)
    return args


if __name__ == "__main__":
    sys.exit(main())
