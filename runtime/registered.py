"""Memory that a process group has registered with its network, so that collectives need no staging copy of it.

NCCL's process group has a pool of such memory (``ncclMemAlloc``, and ``ncclCommRegister`` for each piece), the one that
``FSDPModule.set_allocate_memory_from_process_group_for_comm`` takes its buffers from.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.groups import backend_of
from .dbuffer import DBuffer

_connected: WeakSet[dist.ProcessGroup] = WeakSet()


def registering_group(buffers: Sequence[DBuffer]) -> dist.ProcessGroup:
    """The process group that shards all of ``buffers``, which can allocate registered memory on their device.

    Raises:
        RuntimeError: it can't, or they are sharded by several groups, none of which has registered another's memory.
    """
    where = f"[rank {dist.get_rank()}] vescale option registered_memory=True:"
    first, *others = buffers
    group, device = first.group, first.shard.device
    for other in others:
        if other.group is not group:
            raise RuntimeError(
                f"{where} one graph reads unit {first.name}, sharded over {first.mesh}, and unit {other.name}, sharded "
                f"over {other.mesh}, and a slot serves both. Shard both over one mesh, or leave the option out."
            )
    if not backend_of(group, device).supports_tensor_alloc(device):
        raise RuntimeError(
            f"{where} the {dist.get_backend(group)} process group of unit {first.name} has no registered memory on "
            f"{device}. NCCL has, on GPUs and drivers that allow it; elsewhere leave the option out."
        )
    return group


def allocate_registered(nbytes: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """Uninitialized memory of ``group``'s pool, uint8 [nbytes]; freed into the pool like any tensor.

    A collective, the first time for each group.
    """
    if group not in _connected:
        # NCCL registers memory with a communicator, which the first collective of a process group makes.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)
    return backend_of(group, device).allocate_tensor(nbytes, dtype=torch.uint8, device=device)
