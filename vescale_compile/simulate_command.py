"""`python -m vescale_compile simulate`: predict a training step on a cluster that is not there."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_compile import module_shapes
from vescale_compile.cost import OPTIMIZERS, PRESETS, Cluster, OptimizerCost
from vescale_compile.examples.llama import SIZES, Llama
from vescale_compile.hardware import cluster_for
from vescale_compile.options import Options
from vescale_compile.passes.context import GraphError
from vescale_compile.planner.models import PUBLISHED, published
from vescale_compile.published_graphs import ASSUMPTIONS, published_graph
from vescale_compile.quantities import bytes_in, in_columns, least_text, positive, share_in, size_text, time_text
from vescale_compile.schedule import BudgetError, Scheduled, TaskGraph, find_schedule, lean_schedule, lower_bound
from vescale_compile.sharding import fully_shard
from vescale_compile.simulation import Simulation, simulate

_POLICIES = {"bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "fp32": MixedPrecisionPolicy()}
_MASTER_BYTES = 4  # of a published model's sharded parameter


Budget = int | str | None
"""Bytes, a share of the device's memory, or what the compiler takes of itself."""


@dataclass(frozen=True)
class Row:
    """A prediction of one number of replicas, under one memory budget. Times in seconds, memory in bytes with the
    optimizer's states."""

    replicas: int
    budget: Budget
    step: float
    least: float
    compute: float
    communication: float
    exposed: float
    starved: float
    peak: int
    lacking: int
    """of the memory of a device; 0 where the step fits"""
    kept: int | None
    """units that stay unsharded from forward to backward, where the schedule decides that"""

    @classmethod
    def of(cls, found: Simulation, replicas: int, budget: Budget) -> Row:
        """Of a model that went through the compiler, whose report says what is kept."""
        return cls(
            replicas,
            budget,
            found.step_seconds,
            found.least_seconds,
            found.compute_seconds,
            found.communication_seconds,
            found.exposed_seconds,
            found.starved_seconds,
            found.peak_bytes,
            found.lacking_bytes,
            None,
        )


Predicted = Callable[[int, Budget], Row]
"""Of a number of replicas and a budget."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"""{parser.description}.

A published model is simulated from its shapes. {ASSUMPTIONS}
With a budget the schedule keeps units unsharded for the backward where that pays and there is room.

Any other model goes through the compiler's own passes and scheduler (vescale_compile.simulate), as fully_shard shards
it, at the roofline of the device; no activation checkpointing but the model's own."""
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument("--model", choices=[*PUBLISHED, *SIZES], help="a published model, or a size of the example")
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="build transformers' model for a config.json")

    where = parser.add_argument_group("where")
    where.add_argument("--world", type=positive, required=True, metavar="N", help="ranks")
    where.add_argument(
        "--cluster",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(PRESETS)}, or a calibration; one over several ranks is for a --world of as many alone",
    )
    where.add_argument(
        "--budget",
        nargs="+",
        metavar="SIZE",
        help="memory of a rank, optimizer states apart, such as 40GB, or a share of a GPU's with two states for each "
        "parameter, such as 90%%; several for a table (published models: what the device has; others: what gathering "
        "and reducing one unit ahead takes)",
    )
    where.add_argument(
        "--replicas",
        type=positive,
        nargs="+",
        default=[1],
        metavar="N",
        help="of the model, each sharded over --world / N ranks; several for a table (1)",
    )
    add_step_arguments(parser)
    parser.add_argument("--optim", choices=OPTIMIZERS, help="whose step and states are counted (adamw)")
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of a table")


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what a rank does in a step."""
    step = parser.add_argument_group("training step of each rank")
    step.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences (%(default)s)")
    step.add_argument("--seq", type=positive, default=8192, metavar="N", help="tokens of a sequence (%(default)s)")
    step.add_argument("--param-dtype", choices=_POLICIES, help="of gathers and computation (bf16)")
    step.add_argument("--reshard", action=argparse.BooleanOptionalAction, help="free parameters after forward (yes)")


def run(args: argparse.Namespace) -> int:
    """Predict and print; 0 if all went well, 1 if no step fits in one of the budgets, 2 if options make no sense."""
    try:
        _check(args)
        cluster = cluster_for(args.cluster, torch.device("cpu"), args.world)
        budgets = [read_budget(each) for each in args.budget or [None]]
        predicted = functools.partial(_published_row if args.model in PUBLISHED else _row, args, cluster)
        rows, refusals = _rows(predicted, args.replicas, budgets)
    except ValueError as error:
        print(f"simulate: {in_options(error)}", file=sys.stderr)
        return 2
    for refusal in refusals:
        print(f"simulate: {refusal}", file=sys.stderr)
    if not rows:
        return 1
    title = args.model or str(args.hf_config)
    if args.json:
        figures = {"model": title, "cluster": str(cluster), "batch": args.batch, "seq": args.seq}
        print(json.dumps(figures | {"budgets": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"{title}, {args.batch} x {args.seq} tokens a rank, on {cluster}\n")
        _print(rows)
    return int(bool(refusals))


def _rows(predicted: Predicted, replicas: Sequence[int], budgets: Sequence[Budget]) -> tuple[list[Row], list[str]]:
    """The rows of those in which a step fits, and why none does in the others."""
    rows: list[Row] = []
    refusals: list[str] = []
    for count, budget in itertools.product(replicas, budgets):
        try:
            rows.append(predicted(count, budget))
        except (BudgetError, GraphError) as error:
            refusals.append(f"--replicas {count}: " * (count > 1) + in_options(error))
    return rows, refusals


def _check(args: argparse.Namespace) -> None:
    if args.model not in PUBLISHED:
        return
    for option in ("param_dtype", "reshard", "optim"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} is not for a published model, whose step is always the same"
            )


def _published_row(args: argparse.Namespace, cluster: Cluster, replicas: int, budget: Budget) -> Row:
    shards, tokens = cluster.of(_shards(args.world, replicas)), args.batch * args.seq
    graph = published_graph(args.model, shards, tokens, sequence=args.seq, replicas=replicas)
    optimizer, master = OPTIMIZERS["adamw"], _MASTER_BYTES * published(args.model).numel // shards.ranks
    seconds, states = optimizer.seconds(master, cluster.device), optimizer.state_bytes(master)
    # The graph counts the optimizer's states, which no budget does: without one there is what a device has.
    allowed = Options(memory_budget=budget).budget_on(cluster.device, states)
    whole = cluster.device.memory_bytes if allowed is None else allowed + states
    found = _published_schedule(graph, whole, allowed, states)
    timeline = found.timeline
    return Row(
        replicas,
        budget,
        timeline.makespan + seconds,
        lower_bound(graph, whole).makespan + seconds,
        timeline.compute,
        timeline.communication,
        timeline.exposed,
        timeline.starved,
        timeline.peak_bytes,
        cluster.device.lacks(timeline.peak_bytes),
        len(found.schedule.kept),
    )


def _published_schedule(graph: TaskGraph, whole: int | None, budget: int | None, states: int) -> Scheduled:
    """The best in ``whole`` bytes: those of ``budget`` and the optimizer's ``states``, or without one a device's."""
    try:
        return find_schedule(graph) if whole is None else lean_schedule(graph, whole)
    except BudgetError as error:
        least = error.least_bytes
        if budget is None:
            told = f"a device has {size_text(whole or 0)}, but a step needs at least {least_text(least)}, "
            told += f"{size_text(states)} of it the optimizer's states. More ranks to shard over have less each"
        else:
            told = f"--budget is {size_text(budget)}, but a step needs at least {least_text(least - states)}, "
            told += f"the optimizer's states ({size_text(states)}) apart"
        raise BudgetError(told, least) from error


def _row(args: argparse.Namespace, cluster: Cluster, replicas: int, budget: Budget) -> Row:
    return Row.of(simulated(args, cluster, replicas, budget, OPTIMIZERS[args.optim or "adamw"]), replicas, budget)


def simulated(
    args: argparse.Namespace,
    cluster: Cluster,
    replicas: int,
    budget: Budget,
    optimizer: OptimizerCost = OPTIMIZERS["adamw"],
) -> Simulation:
    """The training step of a model that is not a published one's shapes."""
    shape, policy = (replicas, _shards(args.world, replicas)), _POLICIES[args.param_dtype or "bf16"]

    def shard(module: nn.Module) -> nn.Module:
        mesh = None if replicas == 1 else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        return fully_shard(module, mesh=mesh, reshard_after_forward=args.reshard is not False, mp_policy=policy)

    names = ("input_ids", "labels") if args.hf_config is not None else ("tokens", "labels")
    inputs: dict[str, Any] = dict.fromkeys(names, torch.empty(args.batch, args.seq, dtype=torch.int64, device="meta"))
    return simulate(
        _model(args),
        cluster=cluster,
        world_size=args.world,
        memory_budget=budget,
        shard=shard,
        optimizer=optimizer,
        **inputs,
    )


def _shards(world: int, replicas: int) -> int:
    """Over how many ranks the parameters are sharded."""
    if world % replicas:
        raise ValueError(f"--replicas {replicas} does not divide --world {world}: replicas are alike")
    return world // replicas


def _model(args: argparse.Namespace) -> nn.Module:
    if args.hf_config is not None:
        return module_shapes.from_hf_config(args.hf_config)
    with torch.device("meta"):
        return Llama(SIZES[args.model])


def _print(rows: Sequence[Row]) -> None:
    times = ("step", "lower bound", "computation", "communication", "exposed", "starved")
    headings = ("replicas", "budget", *times, "peak", "kept units")
    cells = [
        (
            str(row.replicas),
            _budget_text(row.budget),
            *map(time_text, (row.step, row.least, row.compute, row.communication, row.exposed, row.starved)),
            size_text(row.peak),
            "-" if row.kept is None else str(row.kept),
        )
        for row in rows
    ]
    print("\n".join(in_columns([headings, *cells])))
    print("\nstep and lower bound include the optimizer's step, peak the optimizer's states")
    for row in rows:
        if row.lacking:
            within = "" if row.budget is None else f" --budget {_budget_text(row.budget)}"
            print(
                f"--replicas {row.replicas}{within}: {size_text(row.peak)} is {size_text(row.lacking)} more than a "
                "device has: the step would not run"
            )


def _budget_text(budget: Budget) -> str:
    return "-" if budget is None else budget if isinstance(budget, str) else size_text(budget)


def read_budget(text: str | None) -> Budget:
    """``--budget``, if it was given, as the compiler takes it."""
    if text is None or share_in(text) is not None:
        return text
    if not bytes_in(text):
        raise ValueError(
            f"--budget {text}: give bytes, or a size such as 40GB, or a share of a GPU's memory such as 90%"
        )
    return bytes_in(text)


def in_options(error: Exception) -> str:
    """What the compiler says, of the command's option instead of its own."""
    return str(error).replace("vescale option memory_budget=", "--budget ").replace("memory_budget", "--budget")
