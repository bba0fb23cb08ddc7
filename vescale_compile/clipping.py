"""``clip_grad_norm_``, of models whose ranks have different parameters too: by the norm of all ranks' gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .mesh import spread_mesh, whole_mesh
from .ragged.dtensor import RaggedDTensor
from .ragged.reductions import total_norm
from .runtime.life import ranks_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients down to a total norm, as ``torch.nn.utils.clip_grad_norm_`` does, which refuses parameters that
    other ranks have others of: experts that a program spreads over ranks. Theirs count here on every rank.

    Every rank of the model must call it, with its own parameters. It may have no gradients of some. One all-reduce of
    one number; over a 2-D mesh two.

    Args:
        parameters: from ``fully_shard``, or whole ones, whose gradients are taken to be equal on all ranks. Experts
            that no ``fully_shard`` call was around, of a module with parameters of all ranks, are given together with
            such parameters: alone, nothing says that other ranks have others, and theirs don't count.
        max_norm: the largest norm that is left as it is.
        norm_type: the order of the norm, larger than 0; ``float("inf")`` for the largest element.
        error_if_nonfinite: whether a norm with NaN or infinity raises, on every rank, before anything has changed. The
            CPU then waits for it.
        foreach: whether gradients are scaled together, or one by one; None for together where they can be.

    Returns:
        The total norm before, equal on all ranks: 0-dim, in single precision or that of the parameters, if higher.

    Raises:
        ValueError: another order; or no parameter's mesh, nor that of the model, has all ranks of the others'.
        TypeError: a DTensor that is not from ``fully_shard``.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"clip_grad_norm_: norm_type is {norm_type}; it must be larger than 0, or inf")
    everyone = _everyone(params)
    if everyone is None:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, order, error_if_nonfinite, foreach)
    gradients = [(param, param.grad) for param in params if param.grad is not None]
    norm = total_norm(gradients, order, everyone, params[0].device)
    kinds = (param.dtype.to_real() for param in params)
    norm = norm.to(functools.reduce(torch.promote_types, kinds, torch.float32))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"[rank {dist.get_rank()}] The total norm of order {order} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm


def _everyone(params: list[Tensor]) -> DeviceMesh | None:
    """The mesh of all ranks that have any of the parameters, or others in their place; None if none is sharded."""
    meshes: dict[DeviceMesh, RaggedDTensor] = {}
    for param in params:
        if isinstance(param, RaggedDTensor):
            for mesh in (whole_mesh(param), spread_mesh(param)):
                if mesh is not None:
                    meshes.setdefault(mesh, param)
        elif isinstance(param, DTensor):
            raise TypeError(
                f"[rank {dist.get_rank()}] clip_grad_norm_: a parameter of shape {tuple(param.shape)} is a DTensor "
                f"placed by {param.placements}; give those from fully_shard, and clip others by torch.nn.utils"
            )
    largest = max(meshes, key=DeviceMesh.size, default=None)
    for mesh, param in meshes.items():
        if largest is not None and not set(ranks_of(mesh)) <= set(ranks_of(largest)):
            raise ValueError(
                f"[rank {dist.get_rank()}] clip_grad_norm_: {param!r} is trained by the ranks of {mesh}, and {largest} "
                "has not all of them, so none could sum up for all. Clip those of each mesh by themselves"
            )
    return largest
