"""Counts the collectives of one training step, and their bytes, from PyTorch's execution trace of it.

Every collective of every system goes through one ``c10d::*`` operator, called by hand (DDP, FSDP2) or by a
functional collective in generated code, and the trace records its tensors' sizes and dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
    "send": "send",
    "recv_": "receive",
}
"""Operators of the c10d namespace that move data; others, such as barrier, are not counted."""

_INPUT_SPLITS = 4
"""Which argument of an uneven all-to-all says how much of its input goes to each rank; the input is argument 1"""


@dataclass
class Traffic:
    """Collectives of one kind that one rank took part in."""

    calls: int = 0
    payload_bytes: int = 0
    """of the whole buffers: what all ranks gathered, or what one rank had to be reduced"""
    sent_bytes: float = 0.0
    """what each rank has to send by a bandwidth-optimal algorithm. A library may send more: gloo's
    reduce-scatter is an all-reduce, which sends twice as much."""


def count(nodes: Iterable[dict[str, Any]], world_size: int, rank: int) -> dict[str, Traffic]:
    """Sums up the collectives among the nodes of an execution trace, which ``rank`` recorded."""
    found: dict[str, Traffic] = {}
    for node in nodes:
        namespace, _, name = node["name"].partition("::")
        if namespace != "c10d" or name not in KINDS:
            continue
        kind, arguments = KINDS[name], node["inputs"]["values"]
        # Of a collective's arguments the largest is the unsharded buffer, whether it is input or output.
        payload = max(_tensor_bytes(argument) for argument in arguments)
        traffic = found.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.payload_bytes += payload
        if name == "alltoall_base_" and (splits := arguments[_INPUT_SPLITS]):
            traffic.sent_bytes += _tensor_bytes(arguments[1]) * (1 - splits[rank] / max(sum(splits), 1))
        else:
            traffic.sent_bytes += payload * _sent_share(kind, world_size)
    return found


def _sent_share(kind: str, world_size: int) -> float:
    """How much of its buffer a rank sends: all but its own part, twice to reduce and to hand the results round."""
    if kind in ("send", "receive"):
        return float(kind == "send")
    return (2.0 if kind == "all_reduce" else 1.0) * (world_size - 1) / world_size


def _tensor_bytes(value: Any) -> int:
    """Bytes of an argument: a tensor is [id, storage, offset, elements, bytes of each, device], or it is a list."""
    if not isinstance(value, list):
        return 0
    if len(value) == 6 and isinstance(value[5], str):
        return int(value[3]) * int(value[4])
    return sum(_tensor_bytes(item) for item in value)
