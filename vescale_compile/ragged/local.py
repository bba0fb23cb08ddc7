"""What the handlers of RaggedDTensor operations share: layouts, slices, the error that refuses."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from traceback import walk_stack
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShardError

_USUAL_WAYS_OUT = (
    "Call .full_tensor() for the whole tensor (on every rank), or .to_local() for this rank's flat shard. In the "
    "forward of a module given to fully_shard, and in a method given to register_forward_method, a parameter is "
    "whole where it is read as an attribute of its module (self.linear.weight), and a shard where parameters(), "
    "named_parameters() or _parameters give it. To save a model: torch.distributed.checkpoint, or, on every rank, "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))."
)


def refuse(func: OpOverload, tensor: DTensor, reason: str, otherwise: str = _USUAL_WAYS_OUT) -> NoReturn:
    """Raises RaggedShardError, naming the operation, the tensor's global shape, the rank and the ways out."""
    raise RaggedShardError(f"{func} on {tensor!r}: {reason}. {_way_out(inspect.currentframe(), otherwise)}")


_NOT_ELEMENTWISE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


def _way_out(frame: FrameType | None, otherwise: str) -> str:
    """What to do, by who asks for what can't be done; ``otherwise`` where that is nobody known."""
    for caller, _ in walk_stack(frame):
        asking = caller.f_locals.get("self")
        if isinstance(asking, _NOT_ELEMENTWISE):
            return (
                f"{type(asking).__name__} looks at more of a parameter than single elements, and a rank has a shard. "
                "Take an optimizer that doesn't (AdamW, SGD and most of torch.optim), or one of vescale_compile.optim"
            )
        if isinstance(asking, torch.optim.Optimizer) and (found := _whole_in(asking)):
            return found
        if isinstance(asking, nn.parallel.DistributedDataParallel):
            return "Leave out DistributedDataParallel: gradients are averaged without it"
    return otherwise


def _whole_in(optimizer: torch.optim.Optimizer) -> str:
    """What to do of the first whole state of a sharded parameter; empty if there is none."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(param, RaggedDTensor) and _is_whole(value, param):
                return (
                    f"{type(optimizer).__name__} has a whole tensor as state {key!r} of {param!r}: load_state_dict "
                    "took it from an optimizer of parameters that are not sharded. Load optimizer states by "
                    "torch.distributed.checkpoint (get_optimizer_state_dict, load, set_optimizer_state_dict)"
                )
    return ""


def _is_whole(value: object, like: RaggedDTensor) -> bool:
    """Whether it is a plain tensor that has the elements of all ranks."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return value.ndim > 0 and value.shape == like.shape


def first_ragged(args: Sequence[Any], kwargs: dict[str, Any]) -> RaggedDTensor:
    """The first RaggedDTensor among the arguments or in their lists."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, RaggedDTensor):
                return item
    raise AssertionError("dispatched without a RaggedDTensor")


def with_defaults(args: tuple[Any, ...], *defaults: Any) -> tuple[Any, ...]:
    """Positional arguments of an operation, of which the dispatcher leaves trailing defaults out.

    `defaults` are those of all arguments but the first.
    """
    return args + defaults[len(args) - 1 :]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def same_layout(first: DTensor, second: object) -> bool:
    """Whether both are distributed alike: corresponding elements on the same rank, in the same order.

    Raises:
        RaggedShardError: the second was loaded from what another rank has saved.
    """
    if not isinstance(second, DTensor):
        return False
    a, b = first._spec, second._spec
    if a is b:
        return True
    same_mesh = a.mesh is b.mesh or a.mesh == b.mesh
    if same_mesh:
        check_is_of_this_rank(first, second)
    return same_mesh and first.shape == second.shape and (a.placements == b.placements or _same_runs(first, second))


def check_is_of_this_rank(tensor: DTensor, loaded: DTensor) -> None:
    """RaggedShardError if the second, over an equal mesh, was loaded from what another rank has saved."""
    here, there = tensor._spec.mesh, loaded._spec.mesh
    if here is not there and (saved := there.get_coordinate()) != here.get_coordinate():
        raise RaggedShardError(
            f"[rank {dist.get_rank()}] a tensor of shape {tuple(loaded.shape)} holds the elements of another rank, "
            f"that at {saved} of the mesh, which has saved it: torch.save writes a rank's own elements. Save on every "
            "rank to a file of its own, or by torch.distributed.checkpoint"
        )


def _same_runs(first: DTensor, second: DTensor) -> bool:
    """In units of other sizes, as those of a flattened tensor and of a slice of it are."""
    return (
        isinstance(first, RaggedDTensor)
        and isinstance(second, RaggedDTensor)
        and first.placement.held(first.shape) == second.placement.held(second.shape)
    )


def is_partial(tensor: DTensor) -> bool:
    """Whether the values still have to be reduced over some mesh dimension."""
    return any(placement.is_partial() for placement in tensor.placements)


def is_replicated(tensor: DTensor) -> bool:
    """Whether every rank holds all the values."""
    return all(placement.is_replicate() for placement in tensor.placements)


def scalar_operand(func: OpOverload, like: RaggedDTensor, value: torch.Tensor) -> torch.Tensor:
    """A tensor not distributed like `like`, as an operand for its local: only a single number can be."""
    if isinstance(value, DTensor):
        if value.ndim != 0 or not is_replicated(value):
            if same_layout(like, value):
                remedy = "make it by RaggedDTensor.from_local, or by torch.zeros_like and its kin"
                refuse(
                    func, like, f"the other tensor is a plain DTensor under RaggedShard, not a RaggedDTensor; {remedy}"
                )
            refuse(func, like, f"the other tensor is {value!r}, not placed as this one; redistribute it")
        return value._local_tensor
    if value.ndim != 0:
        reason = f"the other tensor is a plain one of shape {tuple(value.shape)}; only 0-dim ones mix with shards"
        if not _is_whole(value, like):
            refuse(func, like, reason)
        refuse(
            func,
            like,
            reason,
            "A gradient that is set, and an optimizer's state, must be sharded like their parameter: on every rank, "
            "torch.zeros_like(param).copy_(whole). To compute with a parameter as a whole tensor: .full_tensor()",
        )
    return value


def my_slice(whole: torch.Tensor, like: RaggedDTensor) -> torch.Tensor:
    """The elements of a whole tensor that this rank holds of `like`, flat; a view if it can be."""
    start, stop = like.interval
    return whole.reshape(-1)[start:stop]
