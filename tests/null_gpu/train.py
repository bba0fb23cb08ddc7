"""Ranks that train the example on null GPUs for three steps; the first prints what it took."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from gpus import launches
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import vescale_compile as vc
from vescale_compile.examples.llama import SIZES, Llama
from vescale_compile.local_ranks import start_local_ranks
from vescale_compile.optim.adamw8bit_kernel import Codebooks
from vescale_compile.optim.gradients import UnusableGradients
from vescale_compile.report import Report

STEPS = 3
WIDE = replace(SIZES["1B"], layers=4)
QUANTIZED = {"quantize": vc.BlockFP8((64, 64)), "quantize_gradients": vc.BlockInt8(256)}


def train(rank: int, folder: str, how: dict[str, Any], world_size: int, rendezvous: str) -> None:
    os.environ["NULL_GPU_LOG"] = f"{folder}/rank{rank}.log"
    log = ctypes.CDLL(None).null_gpu_log
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # Groups that are split off a communicator of the null GPU would have as many ranks as it has.
    bound = device if how["replicas"] == 1 else None
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, device_id=bound)
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    with device:
        model = Llama(WIDE if how["wide"] else SIZES["small"])
        tokens = torch.zeros(2, 2048 if how["wide"] else 64, dtype=torch.int64)
    if how["own_kernels"]:
        _take_own_norms(model)
    vc.fully_shard(model, **_layout(how, world_size))
    compiled = _compiled(model, how)
    optimizer = _optimizer(how["optimizer"], model)
    scaler = torch.amp.GradScaler("cuda", enabled=how["scaled"])
    accumulating = vc.no_sync if how["micro_batches"] > 1 else contextlib.nullcontext
    with accumulating(model):
        report = Report(()) if how["by_layer"] else vc.explain(compiled, tokens, tokens, options=how["options"])
    for step in range(STEPS):
        log(b"step %d", step)
        torch.cuda.reset_peak_memory_stats()
        with accumulating(model):
            for _ in range(how["micro_batches"] - 1):
                compiled(tokens, tokens).backward()
        log(b"micro_batch %d", how["micro_batches"] - 1)
        scaler.scale(compiled(tokens, tokens)).backward()
        peak = torch.cuda.max_memory_allocated() - before
        log(b"optimizer %d", step)
        with contextlib.suppress(UnusableGradients):  # nothing computes what says whether they are
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    log(b"step %d", STEPS)
    units = len({unit.name for graph in report.graphs for unit in graph.units})
    kept = [value.to_local() for state in optimizer.state.values() for value in state.values() if value.dim()]
    if isinstance(optimizer, vc.optim.AdamW8bit):
        kept += [table for book in Codebooks.on(device) for table in book]
    states = sum(value.nbytes for value in kept)
    planned = max((graph.peak_bytes for graph in report.graphs), default=0)
    found = counters["aot_autograd"]["autograd_cache_hit"]
    if rank == 0:
        told = {"peak": peak, "planned": planned, "states": states, "units": units, "found": found}
        print(json.dumps(told | {"launches": [(kind, numel) for kind, numel, _ in launches(report)]}))
    dist.destroy_process_group()


def _compiled(model: Llama, how: dict[str, Any]) -> Any:
    if not how["by_layer"]:
        return torch.compile(model, backend="vescale", options=how["options"])
    for layer in model.layers:
        layer.compile(backend="vescale", options=how["options"])
    return model


def _layout(how: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Arguments of ``fully_shard``."""
    low = torch.float16 if how["scaled"] else torch.bfloat16
    layout: dict[str, Any] = {
        "mp_policy": vc.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        "reshard_after_forward": not how["kept"],
    }
    if how["quantized"]:
        layout |= QUANTIZED
    if how["replicas"] > 1:
        sizes = how["replicas"], world_size // how["replicas"]
        layout["mesh"] = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard"))
    if how["optimizer"] == "AdamW8bit":
        layout["granularity"] = vc.optim.AdamW8bit.granularity
    return layout


def _take_own_norms(model: torch.nn.Module) -> None:
    from own_norm import OwnNorm  # of Triton, which some builds of PyTorch lack

    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.__class__ = OwnNorm


def _optimizer(name: str, model: torch.nn.Module) -> Optimizer:
    if name == "Muon":
        return vc.optim.Muon(model.named_parameters())
    if name == "AdamW8bit":
        return vc.optim.AdamW8bit(model.parameters(), check_gradients=False)
    return torch.optim.AdamW(model.parameters(), fused=True)


if __name__ == "__main__":
    start_local_ranks(train, (sys.argv[2], json.loads(sys.argv[3])), int(sys.argv[1]))
