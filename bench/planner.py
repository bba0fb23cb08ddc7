"""Padding and planning time on published models: ``python bench/planner.py``.

For each model and block size, three lines over the numbers of ranks: padding of the whole model; padding of
its worst unit; and the worst gap between the shard size of a buffer and its proven bound. A fourth gives the
CPU time to plan the model from nothing: equal units share one search, and nothing is left from earlier plans.
With ``--experts`` only the experts' matrices have blocks, and other tensors are cut anywhere.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable, Sequence

from options import count

from vescale_compile.planner import Granularity, Rows, UnitPlan, plan_unit
from vescale_compile.planner.models import PUBLISHED, published
from vescale_compile.planner.unit import plan_content

WORLDS = (8, 64, 128, 512, 1024, 8192, 32768)
BLOCKS = {1: "1 row", 16: "16 rows", 32: "32 rows", 128: "128 rows"}
EXPERT = re.compile(r"\.experts\.(\d+\.)?(gate|up|gate_up|down)_proj(\.weight)?$")

Plans = Sequence[UnitPlan]

LINES: dict[str, Callable[[Plans], float]] = {
    "padding %": lambda plans: 100 * sum(p.padding_numel for p in plans) / sum(p.numel for p in plans),
    "worst unit %": lambda plans: max(p.padding_percent for p in plans),
    "worst gap %": lambda plans: max(b.gap_percent for p in plans for b in p.buffers),
}


def blocks_of(rows: int, *, experts_only: bool) -> Callable[[str, tuple[int, ...]], Granularity | None]:
    """Blocks of ``rows`` rows for matrices: all but biases, or the experts' alone."""

    def rule(name: str, shape: tuple[int, ...]) -> Granularity | None:
        chosen = EXPERT.search(name) if experts_only else len(shape) > 1 and not name.endswith("bias")
        return Rows(rows) if chosen else None

    return rule


def measure(model: str, rows: int, world_size: int, *, experts_only: bool, repeats: int) -> tuple[Plans, float]:
    """The plans of a model's units, and the least CPU time in milliseconds of ``repeats`` cold runs."""
    units = published(model).specs(2, blocks_of(rows, experts_only=experts_only)).values()
    times = []
    for _ in range(repeats):
        plan_content.cache_clear()
        gc.collect()
        start = time.process_time()
        plans = [plan_unit(unit, world_size) for unit in units]
        times.append(1000 * (time.process_time() - start))
    return plans, min(times)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PUBLISHED, action="append", help="only this one; may be repeated")
    parser.add_argument("--experts", action="store_true", help="blocks for the experts' matrices alone")
    parser.add_argument("--repeats", type=count, default=3, help="cold runs to time (%(default)s)")
    args = parser.parse_args()
    for model in args.model or PUBLISHED:
        which = "the experts' matrices" if args.experts else "every matrix"
        print(f"\n{model}, blocks on {which}")
        print(f"{'ranks':32}" + "".join(f"{world:>11,}" for world in WORLDS))
        for rows, name in BLOCKS.items():
            runs = [measure(model, rows, world, experts_only=args.experts, repeats=args.repeats) for world in WORLDS]
            print(name)
            for line, figure in LINES.items():
                print(f"  {line:30}" + "".join(f"{figure(plans):11.3f}" for plans, _ in runs))
            print(f"  {'CPU ms':30}" + "".join(f"{milliseconds:11.1f}" for _, milliseconds in runs))


if __name__ == "__main__":
    main()
