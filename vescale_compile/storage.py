"""Memory of sharded parameters: moving a unit's shard to another device or dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from .ragged.dtensor import RaggedDTensor
from .runtime.boundary import Binding


@torch.no_grad()
def convert_buffer(param: RaggedDTensor, fn: Callable[[Tensor], Tensor]) -> None:
    """What ``fn`` (of ``nn.Module._apply``) does to a sharded parameter.

    A new device or dtype is taken by the whole buffer, because parameters are views of it; for the other
    parameters ``fn`` then has nothing left to do. New values are copied into the parameter's place.
    """
    buffer, index = cast(Binding, param._vescale_binding)  # type: ignore[attr-defined]
    local = buffer.local(buffer.shard, index)
    converted = fn(local)
    if converted.dtype == local.dtype and converted.device == local.device:
        if converted is not local and not local.is_meta:
            local.copy_(converted)
        return
    buffer.set_shard(fn(buffer.shard))
    for i, sharded in enumerate(buffer.params):
        _point(cast(RaggedDTensor, sharded), buffer.local(buffer.shard, i), fn)


def _point(param: RaggedDTensor, local: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Makes ``param`` a view of ``local``; it stays the object that optimizers and modules hold."""
    grad, param.grad = param.grad, None
    moved = param.with_local(local)
    if param.is_meta != local.is_meta:
        # PyTorch refuses to set meta data; swapping is refused in turn once a graph was compiled.
        moved.requires_grad_(param.requires_grad)
        vars(moved).update(vars(param))
        torch.utils.swap_tensors(param, moved)
    else:
        torch.Tensor.data.__set__(param, moved)  # type: ignore[attr-defined]
        param._local_tensor, param._spec = local, moved._spec
    if grad is not None:
        param.grad = param.with_local(fn(cast(RaggedDTensor, grad)._local_tensor))
