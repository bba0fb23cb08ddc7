"""Two ranks that train the example on this machine's GPUs, or GPU; the first says what a step did."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpus import launches, take_gpu
from scripts import BENCH
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc
from vescale_compile.examples.llama import SIZES, Llama
from vescale_compile.local_ranks import start_local_ranks
from vescale_compile.report import Report

sys.path.append(str(BENCH))

import step_census
from profiling import recorded
from states import state_bytes

RANKS = 2
TIMEOUT = timedelta(minutes=3)
COLLECTIVES = {
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
}
"""What PyTorch calls those that it launches, one or several joined"""


def train(rank: int, world_size: int, rendezvous: str) -> None:
    device = take_gpu(rank, world_size)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=world_size, timeout=TIMEOUT)
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    with device:
        model = Llama(SIZES["small"])
        tokens = torch.randint(0, 256, (2, 64))
    vc.fully_shard(model, mp_policy=vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    compiled = torch.compile(model, backend="vescale")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    report = vc.explain(compiled, tokens, tokens)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        _step(compiled, optimizer, tokens)
    peak = torch.cuda.max_memory_allocated() - before
    events = _events_of_a_step(compiled, optimizer, tokens)
    recording = recorded(lambda: compiled(tokens, tokens).backward(), device)
    (graph,) = report.graphs
    units, entries = [unit.name for unit in graph.units], {part: each.entries for part, each in graph.parts.items()}
    if rank == 0:
        found = {
            "peak": peak,
            "planned": graph.peak_bytes + state_bytes([optimizer]),
            "found": counters["aot_autograd"]["autograd_cache_hit"],
            "scheduled": _scheduled(report),
            "launched": _launched(events, world_size),
            "census": _told(step_census.of_graphs(entries)),
            "counted": _told(step_census.of_step(recording.tree, recording.kernels, units, world_size)),
            "kernels": [
                [event["args"]["stream"], event["name"], event["ts"], event["ts"] + event["dur"]]
                for event in events
                if event.get("cat") in ("kernel", "gpu_memcpy")
            ],
        }
        print(json.dumps(found))
    dist.destroy_process_group()


def _step(compiled: nn.Module, optimizer: Optimizer, tokens: Tensor) -> None:
    compiled(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _events_of_a_step(compiled: nn.Module, optimizer: Optimizer, tokens: Tensor) -> list[dict[str, Any]]:
    """Of PyTorch's profiler. The step fails if it waits for the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.set_sync_debug_mode("error")
        _step(compiled, optimizer, tokens)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def _scheduled(report: Report) -> list[tuple[str, int]]:
    """The collectives of a step in the order of its schedule, those that are joined as one: the kind of each, and the
    elements of its shards."""
    found: list[tuple[str, int]] = []
    joined = 0
    for launch in launches(report):
        joined += launch.numel
        if not launch.with_the_next:
            found.append((launch.kind, joined))
            joined = 0
    return found


def _launched(events: list[dict[str, Any]], world_size: int) -> list[tuple[str, int]]:
    """The same by the profile, in the order of launches."""
    launches = [event for event in events if event["name"] == "record_param_comms"]
    found = []
    for event in sorted(launches, key=lambda event: event["ts"]):
        kind = COLLECTIVES[event["args"]["Collective name"]]
        numel = event["args"]["In msg nelems"]
        found.append((kind, numel // world_size if kind == "reduce_scatter" else numel))
    return found


def _told(census: Counter[step_census.Key]) -> list[list[Any]]:
    of_all: Counter[tuple[str, ...]] = Counter()
    for (part, kind, direction, _), nbytes in census.items():
        of_all[str(part), str(kind), str(direction)] += nbytes
    return sorted([*what, nbytes] for what, nbytes in of_all.items())


if __name__ == "__main__":
    start_local_ranks(train, (), RANKS)
