"""Norms and full reductions of RaggedDTensors: plain tensors, equal on every rank but for :func:`any_here`, by one
all-reduce each, of lists by one for each mesh."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_compile.mesh import spread_mesh, whole_mesh
from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.lists import coalesced
from vescale_compile.ragged.local import (
    first_ragged,
    is_partial,
    is_replicated,
    local_of,
    refuse,
    same_layout,
    with_defaults,
)
from vescale_compile.runtime.life import ranks_of
from vescale_compile.torch_internals.pieces import asked_for_together


def vector_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.linalg.vector_norm`` over all dimensions, or all that are longer than 1."""
    tensor, order, dim, _ = with_defaults(args, 2, None, False)
    shape = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs).shape
    if shape.numel() != 1:
        refuse(func, tensor, f"a norm over dimensions {tuple(dim)} alone")
    (norm,) = _norms(func, tensor, [tensor], order, kwargs.get("dtype"))
    return norm.reshape(shape)


def foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The norm of every tensor in a list, which may also hold plain tensors and DTensors of 1-D meshes."""
    tensors, order, dtype = with_defaults(args, 2, None)
    return _norms(func, first_ragged(args, kwargs), tensors, order, dtype)


def unscale_and_find_inf(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's division of gradients by the scale; a non-finite one is found on every rank or none."""
    tensors, found_inf, inverse_scale = args
    meshes = _by_mesh(func, first_ragged(args, kwargs), tensors)
    func(coalesced([local_of(tensor) for tensor in tensors]), found_inf, inverse_scale)
    for mesh in meshes:
        found_inf.copy_(_all_reduce(found_inf, "max", mesh))


def all_or_any(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor.all()`` and ``tensor.any()`` over the whole tensor."""
    local = func(args[0]._local_tensor)
    op = "min" if func is torch.ops.aten.all.default else "max"
    return _all_reduce(local.to(torch.int32), op, args[0].device_mesh).to(local.dtype)


def any_here(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Whether an element that this rank holds is true: what autograd's anomaly mode, which may be on for one rank
    only, asks of gradients that it looks for NaN in."""
    return func(args[0]._local_tensor)


def total(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor.sum()`` and ``tensor.mean()`` over the whole tensor, added in at least single precision."""
    tensor: RaggedDTensor = args[0]
    _check_no_gradient(func, tensor)
    dtype = func(torch.empty(0, dtype=tensor.dtype, device="meta"), **kwargs).dtype
    local = tensor._local_tensor.to(torch.float32 if _is_short_float(dtype) else dtype)
    result = _all_reduce(local.sum(), "sum", tensor.device_mesh)
    if func is torch.ops.aten.mean.default:
        result = result / tensor.numel()
    return result.to(dtype)


def dot(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.dot`` of two tensors of one dimension, added in at least single precision."""
    ragged, (first, second) = first_ragged(args, kwargs), args
    for each in (first, second):
        if not (isinstance(each, RaggedDTensor) and same_layout(ragged, each)):
            refuse(func, ragged, "the other tensor is not cut alike")
        if each.ndim != 1 or each.dtype != ragged.dtype:
            refuse(func, ragged, "both tensors must have one dimension and the same dtype")
        _check_no_gradient(func, each)
    _by_mesh(func, ragged, (first, second))
    dtype = torch.float32 if _is_short_float(ragged.dtype) else ragged.dtype
    here = torch.dot(first._local_tensor.to(dtype), second._local_tensor.to(dtype))
    return _all_reduce(here, "sum", ragged.device_mesh).to(ragged.dtype)


def extreme(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor.max()`` and ``tensor.min()`` over the whole tensor; NaN where an element is."""
    tensor: RaggedDTensor = args[0]
    _check_no_gradient(func, tensor)
    if tensor.is_complex():
        refuse(func, tensor, "complex numbers have no order")
    floats, is_max = tensor.dtype.is_floating_point, func is torch.ops.aten.max.default
    local = tensor._local_tensor.to(torch.float32 if _is_short_float(tensor.dtype) else tensor.dtype)
    local = local if floats else local.to(torch.int64)
    limit = -math.inf if floats else torch.iinfo(torch.int64).min + 1
    here = func(local) if local.numel() else local.new_full((), limit if is_max else -limit)
    if not floats:
        result = _all_reduce(here, "max" if is_max else "min", tensor.device_mesh)
    else:
        result = _all_reduce_max(here if is_max else -here, tensor.device_mesh)
        result = result if is_max else -result
    return result.to(tensor.dtype)


def _check_no_gradient(func: OpOverload, tensor: RaggedDTensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        # Autograd would make it a plain tensor of the global shape.
        refuse(func, tensor, "its gradient would be a whole plain tensor")


def _norms(
    func: OpOverload,
    like: RaggedDTensor,
    tensors: Sequence[torch.Tensor],
    order: float,
    dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """Every tensor's norm. The powers of the sharded ones' local norms are summed in double precision."""
    norms = _local_norms(tensors, order, dtype)
    wanted = [dtype or tensor.dtype.to_real() for tensor in tensors]
    for mesh, sharded in _by_mesh(func, like, tensors).items():
        values = _norms_over(mesh, torch.stack([norms[i] for i in sharded]).to(torch.float64), order)
        if len(kinds := {wanted[i] for i in sharded}) == 1:
            values = values.to(kinds.pop())  # all in one kernel
        for i, value in zip(sharded, values.unbind(), strict=True):
            norms[i] = value
    return [norm.to(kind) for norm, kind in zip(norms, wanted, strict=True)]


def total_norm(
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]], order: float, everyone: DeviceMesh, device: torch.device
) -> torch.Tensor:
    """The norm, of an order larger than 0, of all gradients that any rank of a mesh has: 0-dim, in double precision.

    Args:
        gradients: parameters, which know their replicas, and theirs, sharded over some of those ranks; or plain ones,
            equal on all of them.
        everyone: whose ranks all call it, each with those that it has: none, say.
        device: of the gradients.
    """
    locals_by_copies: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for param, grad in gradients:
        copies = everyone.size()
        if isinstance(param, RaggedDTensor):
            copies = whole_mesh(param).size() // param.device_mesh.size()
        locals_by_copies.setdefault((copies, grad.dtype), []).append(local_of(grad))
    here = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, _), held in locals_by_copies.items():
        norms = torch.stack([norm.to(torch.float64) for norm in _local_norms(coalesced(held), order, None)])
        here = torch.maximum(here, norms.max()) if math.isinf(order) else here + (norms**order).sum() / copies
    if math.isinf(order):
        return _all_reduce_max(here, everyone)
    return _all_reduce(here, "sum", everyone) ** (1.0 / order)


def _norms_over(mesh: DeviceMesh, norms: torch.Tensor, order: float) -> torch.Tensor:
    """Of whole tensors, by those of their parts on each rank."""
    if math.isinf(order):
        return _all_reduce_max(norms, mesh) if order > 0 else -_all_reduce_max(-norms, mesh)
    if order == 0:
        return _all_reduce(norms, "sum", mesh)
    return _all_reduce(norms**order, "sum", mesh) ** (1.0 / order)


def _local_norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    held = [local_of(tensor) for tensor in tensors]
    if dtype is None and all(_is_short_float(local.dtype) for local in held):
        dtype = torch.float32
    present = [local for local in held if local.numel() > 0]
    norms = iter(torch._foreach_norm(present, order, dtype=dtype) if present else ())
    # What nothing adds to a minimum or to a sum of negative powers; to a maximum or a sum.
    empty = held[0].new_full((), math.inf if order < 0 else 0.0, dtype=torch.float64)
    return [next(norms) if local.numel() > 0 else empty for local in held]


def _by_mesh(func: OpOverload, like: RaggedDTensor, tensors: Sequence[torch.Tensor]) -> dict[DeviceMesh, list[int]]:
    """Where in the list the tensors of each mesh are, those that every rank holds whole apart.

    Raises:
        RaggedShardError: they are not all of the same ranks, or other ranks have others of one; or placed otherwise.
            Of one alone, too: PyTorch asks for those of each dtype by themselves, or one by one, and adds up. What
            it asks for so, by functions known to do it, is looked at together.
    """
    found: dict[DeviceMesh, list[int]] = {}
    trained_by: set[DeviceMesh] = set()
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, DTensor) or is_replicated(tensor):
            continue
        if tensor.device_mesh.ndim > 1 or is_partial(tensor):
            where = f"{tensor.placements} over {tensor.device_mesh}"
            refuse(func, like, f"the list also holds a tensor placed by {where}; redistribute it")
        found.setdefault(tensor.device_mesh, []).append(i)
        trained_by.add(whole_mesh(tensor))
        if spread_mesh(tensor) is not None:
            _refuse_spread(func, tensor)
    trained_by.update(_others_trained_by(tensors))
    if len(trained_by) > 1 and len({tuple(ranks_of(mesh)) for mesh in trained_by}) > 1:
        _refuse_spread(func, like)
    return found


def _others_trained_by(tensors: Sequence[torch.Tensor]) -> set[DeviceMesh]:
    """Who trains what PyTorch asks for together with these tensors, if it asks piece by piece. Where it asks for each
    alone, that is said of the first: of each it would take long for many."""
    together = asked_for_together(inspect.currentframe())
    if len(together) <= len(tensors):
        return set()
    first = next((each for each in together if isinstance(each, RaggedDTensor)), None)
    if len(tensors) == 1 and tensors[0] is not first:
        return set()
    return {whole_mesh(each) for each in together if isinstance(each, DTensor) and not is_replicated(each)}


def _refuse_spread(func: OpOverload, tensor: DTensor) -> NoReturn:
    refuse(
        func,
        tensor,
        "there are tensors that other ranks have others of (experts, say), so that ranks would come to other results. "
        "Clip gradients by vescale_compile.clip_grad_norm_, which sums up over all ranks; train in bfloat16, for which "
        "no GradScaler is needed; and give these to an optimizer that takes no norms or dot products",
    )


def _is_short_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _all_reduce(values: torch.Tensor, op: str, mesh: DeviceMesh) -> torch.Tensor:
    c10d = torch.ops._c10d_functional
    for group in mesh.get_all_groups():
        values = c10d.wait_tensor(c10d.all_reduce(values, op, group.group_name))
    return values


def _all_reduce_max(values: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The maxima, NaN where any rank has NaN: backends' own maxima may drop it."""
    nan = values.isnan()
    both = torch.stack([values.masked_fill(nan, -math.inf), nan.to(values.dtype)])
    maxima, any_nan = _all_reduce(both, "max", mesh)
    return maxima.masked_fill(any_nan > 0, math.nan)
