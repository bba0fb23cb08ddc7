"""What the handlers of RaggedDTensor operations share: layouts, slices, the error that refuses an operation."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_compile.ragged_dtensor import RaggedDTensor
from vescale_compile.ragged_shard import RaggedShardError


def refuse(func: OpOverload, tensor: RaggedDTensor, reason: str) -> NoReturn:
    """Raises RaggedShardError, naming the operation, the tensor with its global shape and rank, and the ways out."""
    raise RaggedShardError(
        f"{func} on {tensor!r}: {reason}. Call .full_tensor() for the whole tensor (on every rank), or .to_local() "
        f"for this rank's flat shard. In the forward of a module given to fully_shard, its parameters are whole "
        f"tensors."
    )


def first_ragged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedDTensor:
    """The first RaggedDTensor among the arguments or in their lists."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, RaggedDTensor):
                return item
    raise AssertionError("dispatched without a RaggedDTensor")


def same_layout(first: DTensor, second: object) -> bool:
    """Whether both are distributed alike: corresponding elements are on the same rank, in the same order."""
    if not isinstance(second, DTensor):
        return False
    a, b = first._spec, second._spec
    if a is b:
        return True
    same_mesh = a.mesh is b.mesh or a.mesh == b.mesh
    return same_mesh and a.placements == b.placements and first.shape == second.shape


def is_replicated_scalar(value: DTensor) -> bool:
    """Whether a DTensor stands for a single number that every rank holds."""
    return value.ndim == 0 and all(placement.is_replicate() for placement in value.placements)


def scalar_operand(func: OpOverload, like: RaggedDTensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor that is not distributed like `like`, as an operand for its local: only a single number can be."""
    if isinstance(value, DTensor):
        if not is_replicated_scalar(value):
            refuse(
                func,
                like,
                f"the other tensor is placed by {value.placements} over shape {tuple(value.shape)}, "
                f"not as this one; redistribute it",
            )
        value = value._local_tensor
    if value.ndim != 0:
        refuse(
            func,
            like,
            f"the other tensor is a plain one of shape {tuple(value.shape)}, and only 0-dim plain "
            f"tensors mix with shards; distribute_ragged places a whole one alike",
        )
    return value


def my_slice(whole: torch.Tensor, like: RaggedDTensor) -> torch.Tensor:
    """The elements of a whole tensor of `like`'s global shape that this rank holds of `like`; a view if it can be."""
    start, stop = like.placements[0].intervals(like.shape)[like.device_mesh.get_local_rank()]  # type: ignore[attr-defined]
    return whole.reshape(-1)[start:stop]


def common_mesh(func: OpOverload, like: RaggedDTensor, tensors: list[torch.Tensor]) -> DeviceMesh:
    """`like`'s mesh, which every sharded DTensor among `tensors` must share for one reduction to cover them all."""
    for tensor in tensors:
        if (
            isinstance(tensor, DTensor)
            and tensor.device_mesh != like.device_mesh
            and not all(placement.is_replicate() for placement in tensor.placements)
        ):
            refuse(func, like, f"another tensor is sharded over {tensor.device_mesh}; call it for each mesh")
    return like.device_mesh
