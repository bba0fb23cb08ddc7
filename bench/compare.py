"""Trains one model with several systems side by side and compares them: ``python bench/compare.py``.

Prints one Markdown table for each policy, since only systems under one policy do the same communication:
sharded parameters that are gathered again in the backward ("reshard", ZeRO-3) or kept until then ("keep"),
and DDP, which is not sharded. How the runs are interleaved, and what each figure is, is said in harness.py.

All systems at the default size take about 20 GB of memory, since they are alive at the same time; ``--policies`` and
``--systems`` choose fewer.

Settings: ranks on this machine, over its loopback; on two hosts joined by a slow wire (``--wire``, see wire.py);
one GPU for each rank (``--device cuda``); or one process that is rank 0 of ``--world`` ranks, whose collectives send
nothing: for what one rank of a large job allocates, copies and launches.

The exit status is 1 if a system failed, or if they did not compute the same: after the timed steps the loss and
the first gradient's norm of all systems must agree within ``--tolerance``. Where ``--wire`` is not
possible the run is skipped, with a line that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import wire
from harness import Plan, Result, measure
from options import (
    PICTURES,
    check_folder,
    check_picture,
    check_ranks,
    count,
    end_as_interrupted,
    rate,
    seconds,
    some_of,
    write_record,
)
from report import disagreement, tables
from systems import SYSTEMS
from workload import MODELS, Policy, Workload

TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2}


def main() -> int:
    """Measures what the command line asks for, and reports it."""
    args = _arguments()
    end_as_interrupted()
    if args.wire is not None and (missing := wire.what_is_missing()) is not None:
        print(f"Skipped, --wire {args.wire}: {missing}.")
        return 0
    workload = Workload(args.model, args.batch, args.seq, args.dtype, args.device, args.seed, args.micro_batches)
    contenders = [
        (name, policy) for name in args.systems for policy in SYSTEMS[name].policies if policy in args.policies
    ]
    with contextlib.ExitStack() as stack:
        joined = None if args.wire is None else stack.enter_context(wire.wire(args.wire))
        plan = Plan(
            args.warmup,
            args.steps,
            args.ranks,
            args.world,
            args.threads,
            joined,
            args.deadline,
            args.warm_starts,
            args.cold_starts,
        )
        results = measure(contenders, workload, plan, lambda line: print(line, file=sys.stderr, flush=True))
    return _report(results, workload, plan, args)


def _report(results: list[Result], workload: Workload, plan: Plan, args: argparse.Namespace) -> int:
    """Prints the tables and whether all computed the same, and writes the files asked for; 1 if anything failed."""
    setting = _setting(workload, plan)
    print(f"{setting}\n\n{tables(results)}")
    tolerance = args.tolerance if args.tolerance is not None else TOLERANCES[args.dtype]
    differences = {} if plan.fake_world is not None else disagreement(results)
    if not differences:
        print("Nothing checks what was computed: collectives that send nothing, or fewer than two systems to compare.")
    for what, difference in differences.items():
        verdict = "within" if difference <= tolerance else "NOT WITHIN"
        print(f"Largest relative difference of the {what}: {difference:.1e}, {verdict} {tolerance:g}.")
    if args.json is not None:
        _write(args.json, workload, plan, results, differences, tolerance)
    if args.chart is not None:
        from chart import write_chart  # matplotlib is an extra

        write_chart(args.chart, results, setting)
    failed = [result for result in results if result.error is not None]
    for result in failed:
        print(f"\n{result.name} FAILED:\n{result.error}", file=sys.stderr)
    return int(bool(failed) or any(not difference <= tolerance for difference in differences.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems",
        type=some_of("system", SYSTEMS),
        metavar="NAME,...",
        help="; ".join(
            f"{what}: {', '.join(name for name, system in SYSTEMS.items() if system.default is default)}"
            for what, default in (("measured if none are named", True), ("others", False))
        ),
    )
    parser.add_argument(
        "--policies",
        type=some_of("policy", list(Policy)),
        default=list(Policy),
        metavar="NAME,...",
        help=f"of {', '.join(Policy)} (all)",
    )
    parser.add_argument("--ranks", type=count, default=2, help="processes for each system (%(default)s)")
    parser.add_argument("--threads", type=count, default=1, help="CPU threads of a rank (%(default)s)")
    parser.add_argument(
        "--world", type=count, metavar="N", help="one process, as rank 0 of N; collectives send nothing"
    )
    parser.add_argument("--wire", type=rate, metavar="RATE", help="ranks on two hosts joined at 2gbit, say; as root")
    parser.add_argument("--model", choices=MODELS, default="30M", help="Llama, or with experts (%(default)s)")
    parser.add_argument("--batch", type=count, default=1, help="sequences of a rank (%(default)s)")
    parser.add_argument("--micro-batches", type=count, default=1, help="of so many in a step (%(default)s)")
    parser.add_argument("--seq", type=count, default=256, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--dtype", choices=TOLERANCES, default="fp32", help="bf16: mixed precision (fp32)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU a rank (cpu)")
    parser.add_argument("--steps", type=count, default=10, help="timed steps (%(default)s)")
    parser.add_argument("--warmup", type=count, default=3, help="steps before them (%(default)s)")
    parser.add_argument("--warm-starts", type=count, default=3, help="with the caches of the first (%(default)s)")
    parser.add_argument("--cold-starts", type=count, default=1, help="with empty caches, of all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
    parser.add_argument("--deadline", type=seconds, default=900.0, metavar="S", help="of any one step (%(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="relative, of losses and gradient norms "
        f"({', '.join(f'{value:g} in {dtype}' for dtype, value in TOLERANCES.items())})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, raw step times too")
    parser.add_argument(
        "--chart", type=Path, metavar="FILE", help=f"draw step times and memory ({', '.join(PICTURES)})"
    )
    args = parser.parse_args()
    if args.world is not None:
        if args.wire is not None:
            parser.error("--world with --wire: collectives that send nothing use no wire; give one of the two")
        args.ranks = 1
        if unfit := [name for name in args.systems or () if not SYSTEMS[name].fakes]:
            parser.error(f"--world: {', '.join(unfit)} can't run where collectives send nothing; leave it out")
    if args.micro_batches > 1 and (unfit := [name for name in args.systems or () if not SYSTEMS[name].accumulating]):
        parser.error(f"--micro-batches: {', '.join(unfit)} knows steps of one alone; leave it out")
    if args.systems is None:
        args.systems = [
            name
            for name, system in SYSTEMS.items()
            if system.default
            and (system.fakes or args.world is None)
            and (system.accumulating or args.micro_batches == 1)
        ]
    if not any(policy in args.policies for name in args.systems for policy in SYSTEMS[name].policies):
        parser.error(f"--policies {','.join(args.policies)}: none of {', '.join(args.systems)} runs under them")
    check_ranks(parser, args)
    check_folder(parser, "--json", args.json)
    check_picture(parser, "--chart", args.chart)
    return args


def _setting(workload: Workload, plan: Plan) -> str:
    if plan.fake_world is not None:
        where = f"rank 0 of {plan.fake_world} on {workload.device}, collectives send nothing"
    else:
        hosts = "" if plan.wire is None else f" on two hosts, {plan.wire.rate}/s between them"
        where = f"{plan.ranks} ranks of {plan.threads} thread(s) on {workload.device}{hosts}"
    micro = f" in each of {workload.micro_batches} micro-batches" if workload.micro_batches > 1 else ""
    return (
        f"{workload.model}, {workload.dtype}, AdamW; {where}; {workload.batch} x {workload.seq} tokens each{micro}; "
        f"{plan.steps} timed steps; torch {torch.__version__}"
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
        "workload": dataclasses.asdict(workload),
        "plan": dataclasses.asdict(plan),
        "results": [_record(result) for result in results],
        "relative_differences": differences,
        "tolerance": tolerance,
    }
    write_record(path, measured)


def _record(result: Result) -> dict[str, Any]:
    record = dataclasses.asdict(result)
    record["memory"] = [memory._asdict() for memory in result.memory]
    if result.error is None:
        record |= {name: getattr(result, name) for name in ("median_s", "peak_bytes", "compile_s", "warm_compile_s")}
    return record


if __name__ == "__main__":
    sys.exit(main())
