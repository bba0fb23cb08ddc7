"""Where the memory of a rank's process goes: ``python bench/memory.py``.

Trains systems of compare.py one after another, each in processes of its own with empty compiler caches, on this
machine, and splits what the fullest rank's resident set has grown by since before its model was built, at the fullest
moment of the steps after the warm-up. Prints one Markdown table. The exit status is 1 if a system failed.

Linux, glibc and CPython only; threads and caches as in compare.py, whose column "steps MB" is the same figure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from held import Held, held
from options import check_folder, count, end_as_interrupted, seconds, some_of, write_record
from processes import Ranks, RanksFailed
from profiling import StepProfile
from report import MB, row
from systems import OURS, SHARDED, SYSTEMS
from worker import Job, Memory, Trainer
from workload import MODELS, Policy, Workload

HEADINGS = ("system", "parameters", "grown", "tensors", "files", "Python objects", "arenas", "blocks", "rest")
LEGEND = """\
MB. Grown: resident memory of the fullest rank at the fullest moment of a step, above what it was before the model was
built; the sum of the others. Tensors: at that moment, as the profiler counts them. Files: pages of libraries and
generated code. Python objects: those of at most 512 bytes, in use; arenas: what was taken from the system for such, and
is not in use. Blocks: in use and no tensor: larger Python objects, what C++ holds. Rest: freed, and neither used for
tensors again nor returned to the system."""


@dataclass(frozen=True)
class Split:
    """What one rank's resident memory has grown by since its baseline, in bytes."""

    tensors: int
    files: int
    objects: int
    arenas: int
    blocks: int
    rest: int

    @property
    def grown(self) -> int:
        """All of it."""
        return sum(astuple(self))

    @classmethod
    def of(cls, before: Held, after: Held, peak: int, profile: StepProfile) -> Split:
        """Of what was held before the model was built and between two steps, the highest resident memory of the
        steps, and what one of them allocates."""
        new = Held(*(now - then for now, then in zip(after, before, strict=True)))
        blocks = new.blocks - profile.tensors_before
        known = profile.tensor_peak + new.files + new.objects + new.arenas + blocks
        return cls(profile.tensor_peak, new.files, new.objects, new.arenas, blocks, peak - before.resident - known)


class MemoryTrainer(Trainer):
    """A trainer that says what its process holds."""

    def join(self) -> None:
        super().join()
        self._before = held()

    def split(self) -> Split:
        """Since ``start_measuring_memory``; takes one more step."""
        memory: Memory = self.memory()
        return Split.of(self._before, held(), memory.peak_of_steps, self.profile())


def main() -> int:
    """Measures, and prints the table; 1 if a system failed."""
    args = _arguments()
    end_as_interrupted()
    workload = Workload(args.model, 1, args.seq, args.dtype, "cpu", 0)
    splits: dict[tuple[str, Policy], Split] = {}
    failures = []
    contenders = [(name, policy) for policy in args.policies for name in args.systems]
    for name, policy in contenders:
        print(f"{name} ({policy})", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            job = Job(name, policy, workload, args.ranks, None, 1, folder, "cold", None, args.deadline)
            try:
                splits[name, policy] = _measured(job, args.warmup, args.steps)
            except RanksFailed as failure:
                failures.append(f"{name} ({policy}) FAILED:\n{failure}")
    print(
        f"{args.model}, {args.dtype}, AdamW; {args.ranks} ranks of 1 thread; 1 x {args.seq} tokens each; "
        f"torch {torch.__version__}\n\n{table(splits)}\n\n{LEGEND}"
    )
    if args.json is not None:
        rows: list[dict[str, Any]] = [
            {"system": name, "policy": policy, "grown": split.grown, **asdict(split)}
            for (name, policy), split in splits.items()
        ]
        write_record(args.json, {"workload": asdict(workload), "bytes": rows})
    for text in failures:
        print(text, file=sys.stderr)
    return int(bool(failures))


def _measured(job: Job, warmup: int, steps: int) -> Split:
    """Of the fullest rank."""
    ranks = Ranks(job, MemoryTrainer)
    try:
        ranks.ask("build")
        for _ in range(warmup):
            ranks.ask("step")
        ranks.ask("start_measuring_memory")
        for _ in range(steps):
            ranks.ask("step")
        splits: list[Split] = ranks.ask("split")
        ranks.ask("leave")
    finally:
        ranks.close()
    return max(splits, key=lambda split: split.grown)


def table(splits: dict[tuple[str, Policy], Split]) -> str:
    """Markdown, a line for each system and policy."""
    lines = [row(HEADINGS), row(["---", "---", *["---:"] * (len(HEADINGS) - 2)])]
    for (name, policy), split in splits.items():
        parts = (split.grown, *astuple(split))
        lines.append(row([name, policy, *(f"{part / MB:.0f}" for part in parts)]))
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, system in SYSTEMS.items() if Policy.KEEP in system.policies]
    parser.add_argument(
        "--systems",
        type=some_of("system", known),
        default=[OURS, "simplefsdp", "fsdp2-compile"],
        metavar="NAME,...",
        help=f"of {', '.join(known)} ({OURS},simplefsdp,fsdp2-compile)",
    )
    parser.add_argument(
        "--policies",
        type=some_of("policy", SHARDED),
        default=SHARDED,
        metavar="NAME,...",
        help=f"of {', '.join(SHARDED)} (all)",
    )
    parser.add_argument("--ranks", type=count, default=2, help="processes for each system (%(default)s)")
    parser.add_argument("--model", choices=MODELS, default="30M", help="Llama, or with experts (%(default)s)")
    parser.add_argument("--seq", type=count, default=64, help="tokens of a rank (%(default)s)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: mixed precision (fp32)")
    parser.add_argument("--warmup", type=count, default=2, help="steps before the measured ones (%(default)s)")
    parser.add_argument("--steps", type=count, default=7, help="measured steps (%(default)s)")
    parser.add_argument("--deadline", type=seconds, default=900.0, metavar="S", help="of any one step (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the bytes")
    args = parser.parse_args()
    check_folder(parser, "--json", args.json)
    return args


if __name__ == "__main__":
    sys.exit(main())
