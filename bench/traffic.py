"""Counts the collectives of a piece of a program, and their bytes, from PyTorch's execution trace.

Every collective of every system goes through one ``c10d::*`` operator, called by hand (DDP, FSDP2) or by a
functional collective in generated code, and the trace records its tensors' sizes and dtypes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ExecutionTraceObserver

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}
"""Operators of the c10d namespace that move data; others, such as barrier, are not counted."""

SENDS = {"all_reduce": 2.0}
"""How often an optimal algorithm sends all but a rank's own part of a buffer; once where it is not said."""


@dataclass
class Traffic:
    """Collectives of one kind that one rank took part in."""

    calls: int = 0
    payload_bytes: int = 0
    """of the whole buffers: what all ranks gathered, or what one rank had to be reduced"""
    sent_bytes: float = 0.0
    """what each rank has to send by a bandwidth-optimal algorithm. A library may send more: gloo's
    reduce-scatter is an all-reduce, which sends twice as much."""


def record(run: Callable[[], object], world_size: int) -> dict[str, Traffic]:
    """Calls ``run`` and returns its collectives by kind, as this rank saw them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        observer = ExecutionTraceObserver()
        observer.register_callback(str(path))
        try:
            observer.start()
            run()
            observer.stop()
        finally:
            observer.unregister_callback()
        return count(json.loads(path.read_text())["nodes"], world_size)


def count(nodes: Iterable[dict[str, Any]], world_size: int) -> dict[str, Traffic]:
    """Sums up the collectives among the nodes of an execution trace."""
    found: dict[str, Traffic] = {}
    for node in nodes:
        namespace, _, name = node["name"].partition("::")
        if namespace != "c10d" or name not in KINDS:
            continue
        kind = KINDS[name]
        # Of a collective's arguments the largest is the unsharded buffer, whether it is input or output.
        payload = max(_tensor_bytes(argument) for argument in node["inputs"]["values"])
        traffic = found.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.payload_bytes += payload
        traffic.sent_bytes += SENDS.get(kind, 1.0) * payload * (world_size - 1) / world_size
    return found


def _tensor_bytes(value: Any) -> int:
    """Bytes of an argument: a tensor is [id, storage, offset, elements, bytes of each, device], or it is a list."""
    if not isinstance(value, list):
        return 0
    if len(value) == 6 and isinstance(value[5], str):
        return int(value[3]) * int(value[4])
    return sum(_tensor_bytes(item) for item in value)
