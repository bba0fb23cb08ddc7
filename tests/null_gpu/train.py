"""Ranks that train the example on null GPUs for three steps; the first prints what it took."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys

import torch
import torch.distributed as dist

import vescale_compile as vc
from vescale_compile.examples.llama import SIZES, Llama
from vescale_compile.local_ranks import start_local_ranks

STEPS = 3
QUANTIZED = {"quantize": vc.BlockFP8((64, 64)), "quantize_gradients": vc.BlockInt8(256)}


def train(
    rank: int,
    folder: str,
    quantized: bool,
    micro_batches: int,
    options: dict[str, object],
    world_size: int,
    rendezvous: str,
) -> None:
    os.environ["NULL_GPU_LOG"] = f"{folder}/rank{rank}.log"
    log = ctypes.CDLL(None).null_gpu_log
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, device_id=device)
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    with device:
        model = Llama(SIZES["small"])
        tokens = torch.zeros(2, 64, dtype=torch.int64)
    precision = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    vc.fully_shard(model, mp_policy=precision, **QUANTIZED if quantized else {})
    compiled = torch.compile(model, backend="vescale", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    accumulating = vc.no_sync if micro_batches > 1 else contextlib.nullcontext
    with accumulating(model):
        report = vc.explain(compiled, tokens, tokens)
    for step in range(STEPS):
        log(b"step %d", step)
        torch.cuda.reset_peak_memory_stats()
        with accumulating(model):
            for _ in range(micro_batches - 1):
                compiled(tokens, tokens).backward()
        log(b"micro_batch %d", micro_batches - 1)
        compiled(tokens, tokens).backward()
        peak = torch.cuda.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    log(b"step %d", STEPS)
    units = len({unit.name for graph in report.graphs for unit in graph.units})
    kept = (value for state in optimizer.state.values() for value in state.values() if value.dim())
    states = sum(value.to_local().nbytes for value in kept)
    planned = max(graph.peak_bytes for graph in report.graphs)
    if rank == 0:
        print(json.dumps({"peak": peak, "planned": planned, "states": states, "units": units}))
    dist.destroy_process_group()


if __name__ == "__main__":
    start_local_ranks(train, (sys.argv[2], *json.loads(sys.argv[3])), int(sys.argv[1]))
