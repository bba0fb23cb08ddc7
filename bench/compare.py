"""Trains one model with several systems side by side and compares them: ``python bench/compare.py``.

Prints one Markdown table for each policy, since only systems under one policy do the same communication:
sharded parameters that are gathered again in the backward ("reshard", ZeRO-3) or kept until then ("keep"),
and DDP, which is not sharded. How the runs are interleaved, and what each figure is, is said in harness.py.

All systems at the default size take about 15 GB of memory, since they are alive at the same time.

The exit status is 1 if a system failed, or if they did not compute the same: after the timed steps the loss and
the gradient norm of all systems must agree within ``--tolerance``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness import Plan, Result, measure
from report import disagreement, tables
from systems import SYSTEMS, Workload

from vescale_compile.examples.llama import SIZES

TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2}


def main() -> int:
    """Measures, prints the report and writes the JSON file."""
    args = _arguments()
    workload = Workload(args.model, args.batch, args.seq, args.dtype, args.device, args.seed)
    plan = Plan(args.warmup, args.steps, args.ranks, args.threads, args.deadline)
    contenders = [(name, policy) for name in args.systems for policy in SYSTEMS[name].policies]
    results = measure(contenders, workload, plan, lambda line: print(line, file=sys.stderr, flush=True))
    tolerance = args.tolerance if args.tolerance is not None else TOLERANCES[args.dtype]
    differences = disagreement(results)
    print(_setting(workload, plan))
    print(tables(results))
    if not differences:
        print("Fewer than two systems finished: nothing checks what they computed.")
    for what, difference in differences.items():
        verdict = "within" if difference <= tolerance else "NOT WITHIN"
        print(f"Largest relative difference of the {what}: {difference:.1e}, {verdict} {tolerance:g}.")
    if args.json is not None:
        _write(args.json, workload, plan, results, differences, tolerance)
    failed = [result for result in results if result.error is not None]
    for result in failed:
        print(f"\n{result.name} FAILED:\n{result.error}", file=sys.stderr)
    return int(bool(failed) or any(not difference <= tolerance for difference in differences.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems",
        type=_systems,
        default=list(SYSTEMS),
        metavar="NAME,...",
        help=f"of {', '.join(SYSTEMS)} (all)",
    )
    parser.add_argument("--ranks", type=_count, default=2, help="processes for each system (%(default)s)")
    parser.add_argument("--threads", type=_count, default=1, help="CPU threads of a rank (%(default)s)")
    parser.add_argument("--model", choices=SIZES, default="30M", help="size (%(default)s)")
    parser.add_argument("--batch", type=_count, default=1, help="sequences of a rank (%(default)s)")
    parser.add_argument("--seq", type=_count, default=256, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCES, default="fp32", help="bf16: mixed precision (fp32)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU a rank (cpu)")
    parser.add_argument("--steps", type=_count, default=10, help="timed steps (%(default)s)")
    parser.add_argument("--warmup", type=_count, default=3, help="steps before them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
    parser.add_argument("--deadline", type=_seconds, default=900.0, metavar="S", help="of any one step (%(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="relative, of losses and gradient norms "
        f"({', '.join(f'{value:g} in {dtype}' for dtype, value in TOLERANCES.items())})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, raw step times too")
    args = parser.parse_args()
    if args.device == "cuda" and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks}: there are {torch.cuda.device_count()} GPUs, and each rank needs one")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    return args


def _systems(value: str) -> list[str]:
    names = value.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(f"no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(names))


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return int(value)


def _seconds(value: str) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number of seconds")
    return seconds


def _setting(workload: Workload, plan: Plan) -> str:
    return (
        f"Llama {workload.model}, {workload.dtype}, AdamW; {plan.ranks} ranks of {plan.threads} thread(s) on "
        f"{workload.device}, {workload.batch} x {workload.seq} tokens each; {plan.steps} timed steps; "
        f"torch {torch.__version__}\n"
    )


def _write(
    path: Path,
    workload: Workload,
    plan: Plan,
    results: list[Result],
    differences: dict[str, float],
    tolerance: float,
) -> None:
    measured: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {"platform": platform.platform(), "cpus": len(os.sched_getaffinity(0))},
        "workload": dataclasses.asdict(workload),
        "plan": dataclasses.asdict(plan),
        "results": [_record(result) for result in results],
        "relative_differences": differences,
        "tolerance": tolerance,
    }
    path.write_text(json.dumps(measured, indent=2) + "\n")


def _record(result: Result) -> dict[str, Any]:
    record = dataclasses.asdict(result)
    record["memory"] = [memory._asdict() for memory in result.memory]
    if result.error is None:
        record |= {"median_s": result.median_s, "compile_s": result.compile_s}
    return record


if __name__ == "__main__":
    sys.exit(main())
