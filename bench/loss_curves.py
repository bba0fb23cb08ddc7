"""The example's loss under each optimizer, on sharding ranks and on one rank: ``python bench/loss_curves.py``.

Runs ``python -m vescale_compile train``, as a user does, on Python's own sources: with every optimizer once sharded
over ``--ranks`` ranks, and once on a single rank that is not sharded and takes all ranks' batches. Both learn from the
same windows in the same steps, so their curves should lie on each other: what is left is rounding, and what training
makes of it. Writes both as JSON, and as one picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from options import PICTURES, check_folder, check_picture, count, seconds, some_of, write_record

from vescale_compile.examples.llama import SIZES
from vescale_compile.examples.optimizers import RECIPES

COLORS = {"adamw": "#4c72b0", "adamw8bit": "#dd8452", "muon": "#c44e52", "shampoo": "#55a868"}
NAMES = {"adamw": "AdamW", "adamw8bit": "AdamW8bit", "muon": "Muon", "shampoo": "Shampoo"}


@dataclass(frozen=True)
class Curve:
    """One run of the example.

    Attributes:
        optimizer: a name of the example's recipes.
        ranks: how many; more than one shard the model.
        points: steps, each with the mean loss since the one before, in nats per byte.
        validation_loss: on unseen text, after the last step; more ranks look at more of it.
        seconds: the run took, compilation included.
    """

    optimizer: str
    ranks: int
    points: list[tuple[int, float]]
    validation_loss: float
    seconds: float


def main() -> int:
    """Trains, prints a table and writes the files asked for."""
    args = _arguments()
    curves = []
    for optimizer in args.optimizers:
        for ranks in (args.ranks, 1):
            print(f"{NAMES[optimizer]} on {ranks} rank(s)", file=sys.stderr, flush=True)
            curves.append(train(optimizer, ranks, args))
    print(f"{_setting(args)}\n\n{table(curves)}")
    if args.json is not None:
        write_record(args.json, {"setting": _setting(args), "curves": [asdict(curve) for curve in curves]})
    if args.picture is not None:
        draw(args.picture, curves, _setting(args))
    return 0


def train(optimizer: str, ranks: int, args: argparse.Namespace) -> Curve:
    """Trains in processes of its own, to the end.

    Raises:
        subprocess.CalledProcessError: a run failed, after its output was printed.
        subprocess.TimeoutExpired: it took longer than ``--deadline``.
    """
    how = ["--lowering", args.lowering] if ranks > 1 else ["--backend", args.alone]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        report = Path(folder, "report.json")
        command = [
            *(sys.executable, "-m", "vescale_compile", "train", "--optim", optimizer, *how),
            *("--ranks", str(ranks), "--batch", str(args.batch * args.ranks // ranks), "--seq", str(args.seq)),
            *("--model", args.model, "--steps", str(args.steps), "--log-every", str(args.log_every)),
            *("--seed", str(args.seed), "--device", "cpu", "--threads", "1", "--sample", "0", "--json", str(report)),
        ]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=args.deadline,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
        if done.returncode != 0:
            print(done.stdout, file=sys.stderr)
        done.check_returncode()
        measured = json.loads(report.read_text())["report"]
    points = [(step, loss) for step, loss in measured["curve"]]
    return Curve(optimizer, ranks, points, measured["validation_loss"], time.monotonic() - started)


def table(curves: Sequence[Curve]) -> str:
    """A line for each optimizer: its last losses, how far apart its curves are, what it has learned."""
    rows = [
        "| optimizer | last loss, sharded | on one rank | largest relative difference | on unseen text, sharded "
        "| seconds, sharded | on one rank |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for sharded, alone in pairs(curves):
        rows.append(
            f"| {NAMES[sharded.optimizer]} | {sharded.points[-1][1]:.4f} | {alone.points[-1][1]:.4f} "
            f"| {largest_difference(sharded, alone):.1e} | {sharded.validation_loss:.4f} "
            f"| {sharded.seconds:.0f} | {alone.seconds:.0f} |"
        )
    return "\n".join(rows)


def pairs(curves: Sequence[Curve]) -> list[tuple[Curve, Curve]]:
    """The two runs of each optimizer: on several ranks, and on one."""
    return [
        (sharded, alone)
        for sharded in curves
        for alone in curves
        if sharded.optimizer == alone.optimizer and sharded.ranks > alone.ranks == 1
    ]


def largest_difference(sharded: Curve, alone: Curve) -> float:
    """Of the losses at any step, relative to one rank's."""
    return max(abs(a - b) / b for (_, a), (_, b) in zip(sharded.points, alone.points, strict=True))


def draw(path: Path, curves: Sequence[Curve], setting: str) -> None:
    """One picture: a colour for each optimizer, a line for several ranks, dots for one."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    ranks = max(curve.ranks for curve in curves)
    for sharded, alone in pairs(curves):
        color, name = COLORS[sharded.optimizer], NAMES[sharded.optimizer]
        label = f"{name}: {sharded.validation_loss:.3f} on unseen text"
        axes.plot(*zip(*sharded.points, strict=True), color=color, linewidth=1.2, label=label)
        axes.plot(*zip(*alone.points, strict=True), color=color, linestyle="", marker=".", markersize=4)
    axes.plot([], [], color="#555555", linewidth=1.2, label=f"sharded on {ranks} ranks")
    axes.plot([], [], color="#555555", linestyle="", marker=".", markersize=4, label="one rank, not sharded")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    axes.set_title(setting.replace("; ", "\n"), fontsize=8)
    figure.savefig(path, dpi=150)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--optimizers", type=some_of("optimizer", NAMES), default=list(NAMES), metavar="NAME,...", help="(all)"
    )
    parser.add_argument("--ranks", type=count, default=2, help="that shard the model, at least 2 (%(default)s)")
    parser.add_argument("--model", choices=SIZES, default="small", help="of the example (%(default)s)")
    parser.add_argument("--batch", type=count, default=4, help="windows of a sharding rank (%(default)s)")
    parser.add_argument("--seq", type=count, default=128, help="bytes of a window (%(default)s)")
    parser.add_argument("--steps", type=count, default=200, help="(%(default)s)")
    parser.add_argument("--log-every", type=count, default=5, help="steps between two points (%(default)s)")
    parser.add_argument("--lowering", choices=["inductor", "eager"], default="eager", help="sharded (%(default)s)")
    parser.add_argument("--alone", choices=["inductor", "eager"], default="eager", help="one rank's (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (%(default)s)")
    parser.add_argument("--deadline", type=seconds, default=900.0, metavar="S", help="of any one run (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every curve")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"draw them ({', '.join(PICTURES)})")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks 1: a single rank is what sharding ranks are compared with; give 2 or more")
    check_folder(parser, "--json", args.json)
    check_picture(parser, "--picture", args.picture)
    return args


def _setting(args: argparse.Namespace) -> str:
    rates = ", ".join(f"{NAMES[name]} {RECIPES[name].lr:g}" for name in args.optimizers)
    return (
        f"Llama {args.model}, {args.ranks} x {args.batch} x {args.seq} bytes of Python's library a step; "
        f"peak learning rates: {rates}"
    )


if __name__ == "__main__":
    sys.exit(main())
