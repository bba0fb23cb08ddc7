"""SimpleFSDP's compiled graph, with its collectives sent as ours are: what of our gain the messages are, and what not.

Over gloo a peer's reduce-scatter is an all-reduce, which sends twice as much, and its gathers go through a second
buffer; ours sends each rank its part (vescale_compile/runtime/collectives.py). With that put beneath SimpleFSDP, what
is left between the two is when collectives are launched and waited for, how many there are, and where their memory
comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from simple_fsdp import simple_fsdp
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_work
from torch.distributed.device_mesh import init_device_mesh
from workload import Forward, Policy, Workload

from vescale_compile.runtime import ops
from vescale_compile.runtime.collectives import exchanges_directly, scratch_numel
from vescale_compile.runtime.groups import group_named, name_group

_library = torch.library.Library("_c10d_functional", "IMPL", "CPU")  # what is registered goes with it


def simple_fsdp_over_messages(model: nn.Module, workload: Workload, policy: Policy) -> Forward:
    """:func:`simple_fsdp.simple_fsdp` without bucketing, in a process whose gathers and reduce-scatters are messages
    from now on.

    Raises:
        ValueError: where ours sends no messages either.
    """
    name = name_group(init_device_mesh(workload.device, (dist.get_world_size(),)), 0)
    group, device = group_named(name), torch.device(workload.device)
    if not exchanges_directly(device, group):
        raise ValueError(f"ours sends messages on CPUs over gloo, not on {device} over {dist.get_backend()}")

    def gather(shard: Tensor, ranks: int, _: object) -> Tensor:
        full = shard.new_empty(ranks * shard.shape[0], *shard.shape[1:])
        sent = full.view(-1)
        ops.start_all_gather(shard.contiguous().view(-1), sent, 0, name)
        return _in_flight(full, lambda: ops.wait_all_gather(sent, 0))

    def reduce(full: Tensor, operation: str, ranks: int, _: object) -> Tensor:
        if operation != "avg":
            raise ValueError(f"reduce_scatter_tensor: gradients are averaged here, not reduced by {operation!r}")
        shard = full.new_empty(full.shape[0] // ranks, *full.shape[1:])
        sent, kept = full.contiguous().view(-1), shard.view(-1)
        scratch = kept.new_empty(scratch_numel(kept.numel(), device, group))
        ops.start_reduce_scatter(sent, kept, scratch, 0, name, "")
        return _in_flight(shard, lambda: ops.wait_reduce_scatter(sent, kept, scratch, 0))

    _library.impl("all_gather_into_tensor", gather)
    _library.impl("reduce_scatter_tensor", reduce)
    return simple_fsdp(model, workload, policy, bucketed=False)


def _in_flight(result: Tensor, wait: Callable[[], object]) -> Tensor:
    """Has ``wait_tensor`` of a result call ``wait``. A private name of PyTorch registers that, as its own operators of
    symmetric memory do."""
    _register_work(result, _Work(wait))
    return result


class _Work(dist.Work):
    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self._end = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._end()
        return True
