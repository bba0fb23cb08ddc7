"""`python -m vescale_compile explain`: what the compiler makes of a model, seen from one rank of many."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from vescale_compile.cost import PRESETS
from vescale_compile.examples.llama import SIZES
from vescale_compile.hardware import cluster_for
from vescale_compile.passes.context import GraphError
from vescale_compile.quantities import positive
from vescale_compile.report import Report
from vescale_compile.simulate_command import add_step_arguments, in_options, read_budget, simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    parser.description = f"""{parser.description}.

Only shapes go through the compiler, up to where Inductor would generate code, as rank 0 of a process group whose
collectives do nothing. vescale_compile.explain does the same for your model where it is trained."""
    model = parser.add_argument_group("model").add_mutually_exclusive_group()
    model.add_argument("--model", choices=SIZES, default="small", help="a size of the example (%(default)s)")
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="build transformers' model for a config.json")
    where = parser.add_argument_group("where")
    where.add_argument("--world", type=positive, default=2, metavar="N", help="ranks (%(default)s)")
    where.add_argument(
        "--cluster", metavar="NAME|FILE", help=f"{', '.join(PRESETS)}, or a calibration (a guess for CPUs)"
    )
    where.add_argument(
        "--replicas",
        type=positive,
        default=1,
        metavar="N",
        help="of the model, each sharded over --world / N ranks (1)",
    )
    where.add_argument("--budget", metavar="SIZE", help="memory_budget of the step, such as 400MB, or 90%% of a GPU's")
    add_step_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compile shapes and print the report; 2 if the options make no sense or nothing fits."""
    try:
        budget = read_budget(args.budget)
        cluster = cluster_for(args.cluster, torch.device("cpu"), args.world)
        print(Report(simulated(args, cluster, args.replicas, budget).graphs))
    except (ValueError, GraphError) as error:
        print(f"explain: {in_options(error)}", file=sys.stderr)
        return 2
    return 0
