"""`python -m vescale_compile doctor`: is this machine ready to train, and how fast is it?"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vescale_compile.checks import CHECKS, Finding, Verdict, predicted_cluster
from vescale_compile.cost import Calibration
from vescale_compile.cost.calibrate import calibrate
from vescale_compile.local_ranks import check_gpus, join, number_of_ranks, run_local_ranks, under_torchrun
from vescale_compile.quantities import positive

_TIMEOUT = timedelta(minutes=2)  # of each collective of a calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    parser.add_argument("--cluster", metavar="NAME|FILE", help="check this preset or calibration as options['cluster']")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="instead of checking, measure this machine and its collectives, on a quiet machine, and write the file "
        "that options={'cluster': FILE} takes; under torchrun, over its ranks",
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="of --calibrate, local (2; on GPUs one for each)")


def run(args: argparse.Namespace) -> int:
    """Check, or calibrate; 0 if all is well, 1 if something essential is broken, 2 if the options make no sense."""
    try:
        _check(args)
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    if args.calibrate is not None:
        return _calibrate(args.calibrate, args.ranks)
    findings = []
    for check in (*CHECKS, lambda: predicted_cluster(args.cluster)):
        findings.append(check())
        print(_line(findings[-1]), flush=True)
    broken = [finding.what for finding in findings if finding.verdict is Verdict.BROKEN]
    print(f"\nnot ready: {', '.join(broken)}" if broken else "\nready")
    return int(bool(broken))


def _check(args: argparse.Namespace) -> None:
    if args.calibrate is None:
        if args.ranks is not None:
            raise ValueError("--ranks goes with --calibrate alone")
        return
    if args.cluster is not None:
        raise ValueError("--cluster says what to check, and --calibrate does not check: leave one of them out")
    if not args.calibrate.absolute().parent.is_dir():
        raise ValueError(f"--calibrate {args.calibrate}: its folder does not exist")
    ranks = number_of_ranks(args.ranks, _device_type())
    if _device_type() == "cuda":
        check_gpus(ranks, "start fewer")


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _line(finding: Finding) -> str:
    line = f"{finding.verdict.value:<7}{finding.what:<15}{finding.found}"
    return f"{line}\n{'':<22}-> {finding.remedy}" if finding.remedy else line


def _calibrate(path: Path, ranks: int | None) -> int:
    if under_torchrun():
        _measure_as_rank(int(os.environ["LOCAL_RANK"]), path, int(os.environ["LOCAL_WORLD_SIZE"]))
        return 0
    return run_local_ranks("doctor", _measure_as_rank, (path,), number_of_ranks(ranks, _device_type()))


def _measure_as_rank(local_rank: int, path: Path, local_ranks: int, rendezvous: str | None = None) -> None:
    """Measure as one of `local_ranks` that meet at `rendezvous`; without it, as torchrun's environment says."""
    join(local_rank, local_ranks, _device_type(), timeout=_TIMEOUT, rendezvous=rendezvous)
    measured = calibrate(_device_type())
    if dist.get_rank() == 0:
        measured.save(path)
        print("\n".join([*_figures(measured), f"wrote {path}: give options={{'cluster': {str(path)!r}}}"]), flush=True)
    dist.destroy_process_group()


def _figures(measured: Calibration) -> list[str]:
    device = measured.device
    lines = [f"{device.name}, {measured.ranks} rank(s)"]
    lines += [f"  {dtype:<15}{peak / 1e9:10.1f} GFLOP/s" for dtype, peak in device.peak_flops.items()]
    lines.append(f"  {'memory':<15}{device.memory_bandwidth / 1e9:10.1f} GB/s")
    host = f", {1e6 * device.issue:.1f} us of the host" if device.has_host else ""
    lines.append(f"  {'launch':<15}{1e6 * device.launch_overhead:10.1f} us{host}")
    for kind, each in measured.collectives.items():
        lines.append(
            f"  {kind:<15}{each.bandwidth / 1e9:10.2f} GB/s, {1e6 * each.latency:.0f} us, "
            f"{1e6 * each.wakeup:.0f} us more after a pause, {1e6 * (each.launch or each.call):.0f} us to launch, "
            f"{100 * each.load:.0f} % of the device meanwhile"
        )
    return lines
