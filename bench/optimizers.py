"""Memory, time and communication of one step of each optimizer: ``python bench/optimizers.py``.

Trains the example's Llama on several ranks of this machine with this project's optimizers, on its own sharding, and
with their peers, on FSDP2: ``torch.optim.AdamW``, ``torch.optim.Muon`` on DTensors, torchao's ``AdamW8bit`` if it is
installed. Each has processes of its own; all are alive for the whole run and take their steps in turns, as in
compare.py. Of a training step only what the optimizer does is timed and profiled. Shampoo computes each block's first
roots within ten steps, which are best left to the warm-up. Prints one Markdown table.

The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import wire
from harness import Plan, Result, Run, taken_in_turns
from optimizer_trainer import CONTENDERS, OptimizerTrainer
from options import check_folder, check_ranks, count, end_as_interrupted, rate, seconds, some_of, write_record
from profiling import StepProfile
from report import MB, SHORT
from workload import Policy, Workload

from vescale_compile.examples.llama import SIZES

HEADINGS = (
    "optimizer",
    "sharded by",
    "state, bytes a parameter",
    "step ms",
    "min to max",
    "extra MB",
    "collectives",
    "sent MB",
    "first steps s",
    "loss",
)
LEGEND = """\
State: bytes of all ranks' optimizer states, over the model's parameters. Step: the optimizer's part of a training step,
the median over the timed steps, each after an untimed one and from the first rank's start to the last one's end. Of
one more step, profiled: extra, the most that tensors allocated in it take at one time, on the fullest rank; collectives
of a rank, AG all-gathers, AR all-reduces, A2A all-to-alls; sent, what a rank must send at least, the mean over the
ranks. First steps: what the warm-up took longer than as many median steps, compilation above all. Loss: of the last
timed step."""
KINDS = {**SHORT, "all_to_all": "A2A"}


@dataclass
class OptimizerResult(Result):
    """What was measured of one optimizer. Of the profiled step there is one for each rank."""

    parameters: int = 0
    """of the model"""
    state_bytes: list[int] = field(default_factory=list)
    """by rank"""
    profiles: list[StepProfile] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.system

    @property
    def bytes_per_parameter(self) -> float:
        """State of all ranks, over the parameters of the whole model."""
        return sum(self.state_bytes) / self.parameters

    @property
    def extra_bytes(self) -> int:
        """What a step allocates at one time, on the fullest rank."""
        return max(profile.tensor_peak - profile.tensors_before for profile in self.profiles)

    @property
    def sent_bytes(self) -> float:
        """What a rank sends in a step, the mean over the ranks."""
        return statistics.fmean(
            sum(kind.sent_bytes for kind in profile.collectives.values()) for profile in self.profiles
        )


class OptimizerRun(Run):
    """An optimizer on its way."""

    trainer = OptimizerTrainer
    result: OptimizerResult

    def finish(self) -> None:
        self.result.profiles = self.ask("profile")
        self.result.state_bytes = self.ask("states")
        self.result.parameters = self.ask("parameters")[0]
        self.ask("leave")


def main() -> int:
    """Measures, prints the table and writes the file asked for."""
    args = _arguments()
    end_as_interrupted()
    if args.wire is not None and (missing := wire.what_is_missing()) is not None:
        print(f"Skipped, --wire {args.wire}: {missing}.")
        return 0
    names, absent = _installed(args.optimizers)
    for line in absent:
        print(f"{line}\n")
    workload = Workload(args.model, args.batch, args.seq, "fp32", args.device, args.seed)
    runs = [OptimizerRun(OptimizerResult(name, Policy.KEEP)) for name in names]
    with contextlib.ExitStack() as stack:
        joined = None if args.wire is None else stack.enter_context(wire.wire(args.wire))
        plan = Plan(args.warmup, args.steps, args.ranks, None, args.threads, joined, args.deadline)
        stack.enter_context(taken_in_turns(runs, workload, plan, lambda line: print(line, file=sys.stderr, flush=True)))
    results = [run.result for run in runs]
    print(f"{_setting(workload, plan)}\n\n{table(results)}\n\n{LEGEND}")
    if args.json is not None:
        write_record(
            args.json,
            {
                "workload": dataclasses.asdict(workload),
                "plan": dataclasses.asdict(plan),
                "absent": absent,
                "results": [_record(result) for result in results],
            },
        )
    failed = [result for result in results if result.error is not None]
    for result in failed:
        print(f"\n{result.name} FAILED:\n{result.error}", file=sys.stderr)
    return int(bool(failed))


def table(results: Sequence[OptimizerResult]) -> str:
    """The figures, a line for each optimizer."""
    rows = [HEADINGS, ("---", "---", *["---:"] * (len(HEADINGS) - 2)), *map(_cells, results)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cells(result: OptimizerResult) -> Sequence[str]:
    optimizer, sharding = result.name.partition(",")[0], CONTENDERS[result.name].sharding
    if result.error is not None:
        return [optimizer, sharding, "failed", *["-"] * (len(HEADINGS) - 3)]
    collectives = result.profiles[0].collectives
    calls = [f"{traffic.calls} {KINDS.get(kind, kind)}" for kind, traffic in collectives.items() if kind != "receive"]
    return [
        optimizer,
        sharding,
        f"{result.bytes_per_parameter:.3f}",
        f"{1e3 * result.median_s:.1f}",
        f"{1e3 * min(result.steps_s):.1f} to {1e3 * max(result.steps_s):.1f}",
        f"{result.extra_bytes / MB:.2f}",
        " + ".join(calls) or "none",
        f"{result.sent_bytes / MB:.2f}",
        f"{result.compile_s:.1f}",
        f"{result.losses[-1]:.4f}",
    ]


def _installed(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The optimizers that can run here, and a line on each that can't."""
    absent = {
        name: package
        for name in names
        if (package := CONTENDERS[name].package) is not None and importlib.util.find_spec(package) is None
    }
    return [name for name in names if name not in absent], [
        f"{name}: left out, {package} is not installed." for name, package in absent.items()
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--optimizers",
        type=some_of("optimizer", CONTENDERS, ";"),
        default=list(CONTENDERS),
        metavar="NAME;...",
        help=f"of {'; '.join(CONTENDERS)} (all)",
    )
    parser.add_argument("--ranks", type=count, default=2, help="processes for each optimizer (%(default)s)")
    parser.add_argument("--threads", type=count, default=1, help="CPU threads of a rank (%(default)s)")
    parser.add_argument("--wire", type=rate, metavar="RATE", help="ranks on two hosts joined at 2gbit, say; as root")
    parser.add_argument("--model", choices=SIZES, default="30M", help="of the example (%(default)s)")
    parser.add_argument("--batch", type=count, default=1, help="sequences of a rank (%(default)s)")
    parser.add_argument("--seq", type=count, default=64, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU a rank (cpu)")
    parser.add_argument("--steps", type=count, default=10, help="timed steps (%(default)s)")
    parser.add_argument("--warmup", type=count, default=11, help="steps before them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
    parser.add_argument("--deadline", type=seconds, default=900.0, metavar="S", help="of any one step (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, raw step times too")
    args = parser.parse_args()
    check_ranks(parser, args)
    check_folder(parser, "--json", args.json)
    return args


def _setting(workload: Workload, plan: Plan) -> str:
    hosts = "" if plan.wire is None else f" on two hosts, {plan.wire.rate}/s between them"
    return (
        f"{workload.model}, {workload.dtype}; {plan.ranks} ranks of {plan.threads} thread(s) on "
        f"{workload.device}{hosts}; {workload.batch} x {workload.seq} tokens each; {plan.steps} timed steps; "
        f"torch {torch.__version__}"
    )


def _record(result: OptimizerResult) -> dict[str, Any]:
    record: dict[str, Any] = {"optimizer": result.name, "error": result.error}
    if result.error is None:
        names = ("parameters", "state_bytes", "bytes_per_parameter", "median_s", "extra_bytes", "sent_bytes")
        record |= {name: getattr(result, name) for name in (*names, "steps_s", "warmup_s", "losses")}
        record["collectives"] = {
            kind: dataclasses.asdict(traffic) for kind, traffic in result.profiles[0].collectives.items()
        }
    return record


if __name__ == "__main__":
    sys.exit(main())
