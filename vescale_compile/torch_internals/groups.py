"""Process groups, and collectives that the public functions lack.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]


def default_store() -> Store:
    """The store that ``init_process_group`` set up. Public calls only take a store, none gives it back."""
    return dist.distributed_c10d._get_default_store()


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name, which is how graphs hold one."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# Renamed in PyTorch 2.13, where the older names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_coalesced(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup, *, async_op: bool
) -> Any:
    """Several all-gathers as one collective: its work, or, on a GPU's current stream, None. In public only a context
    manager coalesces, and that wants them issued inside it."""
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    return group.allgather_into_tensor_coalesced(outputs, inputs, options)


def reduce_scatter_coalesced(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    op: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
    *,
    async_op: bool,
) -> Any:
    """Several reduce-scatters as one collective: its work, or, on a GPU's current stream, None."""
    options = torch._C._distributed_c10d.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = async_op
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options)


def all_reduce_coalesced(tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Several all-reduces in place, as one collective; on a GPU, on the current stream."""
    options = torch._C._distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = False
    if (work := group.allreduce_coalesced(tensors, options)) is not None:
        work.wait()


def debugged_groups_coalesce() -> bool:
    """Whether process groups can do the three above. Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` those of PyTorch 2.11 are
    wrapped in one that can't."""
    detail = dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    return torch.__version__ >= "2.12" or dist.get_debug_level() != detail  # type: ignore[attr-defined]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What a process group, which has a backend for each type of device, uses for one. No public name gives it."""
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long what a group sends from a type of device may take. Public calls take it, and none tells it.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL the backend is wrapped in one that checks, which before 2.12 has no options.
    """
    backend = backend_of(group, device)
    return getattr(backend, "wrapped_pg", backend).options._timeout


def apart_from_earlier(place: str, ranks: int) -> str:
    """Beginning of the keys under which ranks, which all call this, post. A store may outlive the process group, and
    hold what was posted then: torchrun's does."""
    earlier = (default_store().add(f"{place}/members", 1) - 1) // ranks
    return f"{place}/{earlier}"


def group_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another process group of the same ranks, numbered alike, over gloo, with the same timeout; all make it together.

    The public ``new_group``, called by these ranks alone, names a group by how many groups a rank is in: where these
    are not as many for all, they wait for each other in vain.
    """
    rank, size, gloo = group.rank(), group.size(), dist.ProcessGroup.BackendType.GLOO
    store = PrefixStore(apart_from_earlier(f"vescale/{group.group_name}/way back", size), default_store())
    beside = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout_of(group, torch.device("cpu")))
    beside._register_backend(torch.device("cpu"), gloo, backend)
    beside._set_default_backend(gloo)
    beside._set_group_name(f"{group.group_name} way back")  # type: ignore[arg-type]
    return beside
