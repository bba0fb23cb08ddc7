"""Memory of sharded parameters: a unit's shard is allocated, and moved to another device or dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import cast

import torch
from torch import Tensor, nn

from .mesh import DataParallelMesh
from .planner import BufferPlan
from .ragged.dtensor import RaggedDTensor
from .ragged.placement import RaggedShard
from .runtime.boundary import Binding
from .runtime.dbuffer import CommPolicy, DBuffer, GradientSync, ParamSlot


@torch.no_grad()
def allocate(
    name: str,
    plan: BufferPlan,
    params: dict[str, nn.Parameter],
    mesh: DataParallelMesh,
    policy: CommPolicy,
    sync: GradientSync,
) -> DBuffer:
    """Allocates this rank's shard, copies its part of each parameter into it, and makes the sharded parameters."""
    rank = mesh.shard.get_local_rank()
    like = next(iter(params.values()))
    slots = []
    for key, param in params.items():
        start, stop = plan.interval(key, rank)
        local_start = max(plan.offsets[key] - rank * plan.shard_numel, 0) if stop > start else 0
        slots.append(ParamSlot(key, tuple(param.shape), plan.offsets[key], local_start, stop - start))
    buffer = DBuffer(name, like.new_zeros(plan.shard_numel), tuple(slots), mesh.whole, policy, sync)
    for index, (key, param) in enumerate(params.items()):
        local = buffer.local(buffer.shard, index)
        if not param.is_meta:
            start, stop = plan.interval(key, rank)
            local.copy_(param.detach().reshape(-1)[start:stop])
        placement = _placement(*plan.ragged_shard(key))
        sharded = RaggedDTensor.from_local(local, mesh.shard, [placement], shape=param.shape, whole=mesh.whole)
        buffer.params.append(_as_parameter(sharded, param, Binding(buffer, index)))
    return buffer


# Of thousands of ranks; layers are cut alike.
_placement = functools.lru_cache(maxsize=4096)(RaggedShard)


def _as_parameter(sharded: Tensor, original: nn.Parameter, binding: Binding) -> nn.Parameter:
    param = nn.Parameter(sharded, requires_grad=original.requires_grad)
    for key, value in vars(original).items():  # marks that libraries put on parameters
        setattr(param, key, value)
    # nn.Parameter took an alias below autograd, whose writes would not count as writes to the shard.
    cast(RaggedDTensor, param)._local_tensor = binding.buffer.local(binding.buffer.shard, binding.slot)
    param._vescale_binding = binding  # type: ignore[attr-defined]
    return param


@torch.no_grad()
def convert_buffer(param: RaggedDTensor, fn: Callable[[Tensor], Tensor], together: Container[Tensor]) -> None:
    """What ``fn`` (of ``nn.Module._apply``) does to a sharded parameter.

    A new device or dtype is taken by the whole buffer, because parameters are views of it; for the other
    parameters ``fn`` then has nothing left to do. New values are copied into the parameter's place.

    Raises:
        RuntimeError: the dtype is new, and parameters of the buffer that the model has are not among those that are
            converted ``together``; or the device is none of the mesh's, nor one to keep shards on.
    """
    buffer, index = cast(Binding, param._vescale_binding)  # type: ignore[attr-defined]
    local = buffer.local(buffer.shard, index)
    converted = fn(local)
    if converted.dtype == local.dtype and converted.device == local.device:
        if converted is not local and not local.is_meta:
            local.copy_(converted)
        return
    _check_device(buffer, index, converted.device)
    if converted.dtype != local.dtype:
        _check_converted_together(buffer, index, together)
    buffer.set_shard(fn(buffer.shard))
    for i, sharded in enumerate(buffer.params):
        _point(cast(RaggedDTensor, sharded), buffer.local(buffer.shard, i), fn)


def _check_device(buffer: DBuffer, index: int, device: torch.device) -> None:
    if device.type not in (buffer.mesh.device_type, "cpu", "meta"):
        raise RuntimeError(
            f"[rank {buffer.rank}] parameter {buffer.slots[index].name!r} is sharded over a mesh of "
            f"{buffer.mesh.device_type} devices, and would be moved to {device}. Move the model before fully_shard, or "
            f"shard it with mesh=init_device_mesh({device.type!r}, ...)"
        )


def _check_converted_together(buffer: DBuffer, index: int, together: Container[Tensor]) -> None:
    root = buffer.model.root
    held = set(root.parameters()) if root is not None else set()
    for slot, other in zip(buffer.slots, buffer.params, strict=True):
        if other in held and other not in together:
            raise RuntimeError(
                f"[rank {buffer.rank}] a conversion of a part of the model would give parameter "
                f"{buffer.slots[index].name!r} another dtype than {slot.name!r} has, which lies in the same "
                "buffer. Convert the part before fully_shard, or the whole model"
            )


def _point(param: RaggedDTensor, local: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Makes ``param`` a view of ``local``; it stays the object that optimizers and modules hold."""
    grad, param.grad = param.grad, None
    moved = param.with_local(local)
    if param.is_meta != local.is_meta:
        # PyTorch refuses to set meta data; swapping is refused in turn once a graph was compiled.
        moved.requires_grad_(param.requires_grad)
        vars(moved).update(vars(param))
        hooks, post_hooks = param._backward_hooks, param._post_accumulate_grad_hooks
        torch.utils.swap_tensors(param, moved)
        # Python's dicts of hooks stay where they are; autograd's knowledge of them is swapped away.
        param._backward_hooks, param._post_accumulate_grad_hooks = hooks, post_hooks
    else:
        torch.Tensor.data.__set__(param, moved)  # type: ignore[attr-defined]
        param._local_tensor, param._spec = local, moved._spec
    if grad is not None:
        param.grad = param.with_local(fn(cast(RaggedDTensor, grad)._local_tensor))
