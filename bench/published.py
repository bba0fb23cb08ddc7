"""Predicted steps of published models, and what no schedule of them can beat: ``python bench/published.py``.

Hugging Face's Llama-3-70B, GPT-OSS-120B and DeepSeek-V3 are sharded and compiled as they are for each number of GPUs,
from their shapes alone (``vescale_compile.simulate``): bf16 gathers, fp32 reductions, the activations of every layer
checkpointed, one sequence a rank. Nothing is measured but how long that takes; the times are the cost model's.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from options import check_folder, count, some_of, write_record
from report import header, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoConfig, AutoModelForCausalLM

import vescale_compile as vc
from vescale_compile.cost import PRESETS
from vescale_compile.simulate_command import Budget, Row, read_budget

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "gpt-oss-120b": {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128},
    "deepseek-v3": {"model_type": "deepseek_v3"},
}
"""As Hugging Face's config.json has them; what is left out is transformers' default"""
_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_HEADINGS = ("model", "GPUs", "step ms", "lower bound ms", "÷", "computation", "communication", "exposed", "memory GB")


@dataclass(frozen=True)
class Cell:
    """A predicted step; ``compiling`` is measured, seconds."""

    model: str
    world_size: int
    predicted: Row
    compiling: float


def main() -> int:
    """Prints the table."""
    args = _arguments()
    cells = []
    for name in args.models:
        for world_size in args.worlds:
            cells.append(
                predicted(name, world_size, args.cluster, args.seq, args.layers, budget=args.budget, shards=args.shards)
            )
            print(f"{name}, {world_size} GPUs: {cells[-1].compiling:.0f} s", file=sys.stderr, flush=True)
    print(table(cells))
    if args.json is not None:
        settings = {"cluster": args.cluster, "seq": args.seq, "shards": args.shards}
        write_record(args.json, {**settings, "cells": [asdict(cell) for cell in cells]})
    return 0


def predicted(
    name: str,
    world_size: int,
    cluster: str,
    seq: int,
    layers: int | None,
    budget: Budget = None,
    shards: int | None = None,
) -> Cell:
    """The step of a rank, in as many bytes as ``budget``, if there is one; ``shards`` as :func:`shard` takes it."""
    tokens = torch.empty(1, seq, dtype=torch.int64, device="meta")
    start = time.perf_counter()
    found = vc.simulate(
        build(name, layers),
        input_ids=tokens,
        labels=tokens,
        cluster=cluster,
        world_size=world_size,
        memory_budget=budget,
        shard=functools.partial(shard, shards=shards),
    )
    return Cell(name, world_size, Row.of(found, 1, budget), time.perf_counter() - start)


def build(name: str, layers: int | None, device: str = "meta") -> nn.Module:
    """A model, of all its layers or of the first ``layers``; on the meta device its shapes."""
    depth = {} if layers is None else {"num_hidden_layers": layers}
    config = AutoConfig.for_model(**CONFIGS[name] | depth, use_cache=False)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def shard(model: nn.Module, shards: int | None = None) -> nn.Module:
    """Gathered in bf16, reduced in fp32; all that is no expert by so many ranks, with replicas, if ``shards`` says."""
    fully_shard = functools.partial(vc.fully_shard, mp_policy=_POLICY)
    if shards is None:
        return fully_shard(model)
    replicas = dist.get_world_size() // shards
    around = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            fully_shard(module)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=around)
    return fully_shard(model, mesh=around)


def table(cells: Sequence[Cell]) -> str:
    """Markdown, a line for each step."""
    lines = header(_HEADINGS)
    for cell in cells:
        found = cell.predicted
        times = (found.compute, found.communication, found.exposed)
        figures = [f"{1e3 * found.step:.0f}", f"{1e3 * found.least:.0f}", f"{found.step / found.least:.3f}"]
        figures += [f"{1e3 * seconds:.0f}" for seconds in times] + [f"{found.peak / 1e9:.1f}"]
        lines.append(row([cell.model, str(cell.world_size), *figures]))
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        type=some_of("model", CONFIGS),
        default=list(CONFIGS),
        metavar="NAME,...",
        help=f"of {', '.join(CONFIGS)} (all)",
    )
    parser.add_argument("--worlds", type=_counts, default=[1024], metavar="N,...", help="GPUs (1024)")
    parser.add_argument("--cluster", choices=list(PRESETS), default="h100", help="(%(default)s)")
    parser.add_argument("--seq", type=count, default=8192, metavar="N", help="tokens of a sequence (%(default)s)")
    parser.add_argument("--layers", type=count, metavar="N", help="of each model (all)")
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory of a rank, optimizer states apart, such as 80GB (what overlap is worth)",
    )
    parser.add_argument(
        "--shards",
        type=count,
        metavar="N",
        help="ranks that shard what is around the experts, which all do; the others hold replicas of it (all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args()
    if unfit := [world_size for world_size in args.worlds if world_size % (args.shards or 1)]:
        parser.error(f"--shards {args.shards}: it does not divide {unfit[0]} GPUs")
    try:
        args.budget = read_budget(args.budget)
    except ValueError as error:
        parser.error(str(error))
    check_folder(parser, "--json", args.json)
    return args


def _counts(value: str) -> list[int]:
    return [count(each) for each in value.split(",")]


if __name__ == "__main__":
    sys.exit(main())
