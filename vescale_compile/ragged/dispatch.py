"""Which ATen operations a RaggedDTensor knows, and how each runs on the local tensors.

An allow-list. Running any operation on the flat locals would often be wrong without an error
(``p.norm(dim=1)``, ``p.view(2, -1)``, ``torch.allclose(p, q)``), so each operation is of one of the kinds
below, or raises RaggedShardError.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from vescale_compile.ragged import reductions
from vescale_compile.ragged.dtensor import RaggedDTensor, wrap
from vescale_compile.ragged.lists import run_on_lists
from vescale_compile.ragged.local import (
    first_ragged,
    my_slice,
    refuse,
    same_layout,
    scalar_operand,
    with_defaults,
)
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.runtime.writes import count_writes
from vescale_compile.schemas import aliased

aten = torch.ops.aten

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func`, at least one of whose arguments is a RaggedDTensor.

    Raises:
        RaggedShardError: the operation needs elements that this rank does not hold, or mixes layouts.
    """
    result = _handler(func)(func, args, kwargs)
    if func._schema.is_mutable:
        written = _written_locals(func, args, kwargs)
        torch.autograd.graph.increment_version([local for local in written if not local.is_inference()])
        count_writes(written)
    return result


def _written_locals(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Locals that `func` wrote to. Below autograd nothing else counts the write, and who kept a copy must know."""
    values = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name, is_written in aliased(func)
        if is_written
    ]
    tensors = [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]
    return [t._local_tensor for t in tensors if isinstance(t, RaggedDTensor)]


@functools.cache
def _handler(func: OpOverload) -> Handler:
    if func in _HANDLERS:
        return _HANDLERS[func]
    if _is_elementwise_on_lists(func):
        return run_on_lists
    if _is_elementwise(func):
        return _elementwise
    return _unsupported


def _is_elementwise(func: OpOverload) -> bool:
    """Tagged pointwise, or the in-place form of such an operation (not all of those carry the tag)."""
    # torch.equal is tagged too, but returns one bool; random ones draw for the whole tensor.
    if torch.Tag.nondeterministic_seeded in func.tags or func is aten.equal.default:
        return False
    if torch.Tag.pointwise in func.tags:
        return True
    name = func._opname
    if func.namespace != "aten" or not name.endswith("_"):
        return False
    functional = getattr(getattr(aten, name[:-1], None), func._overloadname, None)
    return torch.Tag.pointwise in getattr(functional, "tags", ())


def _is_elementwise_on_lists(func: OpOverload) -> bool:
    name = func._opname
    if func.namespace != "aten" or func._overloadname.endswith("out"):
        return False
    if name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
        return True
    if not name.startswith("_foreach_"):
        return False
    base = name.removeprefix("_foreach_").removesuffix("_")
    if base in ("copy", "zero"):
        return True
    # Not _foreach_max, _foreach_norm, _foreach_mm: no overload of theirs by these names is elementwise.
    packet = getattr(aten, base, None)
    overloads = ("default", "Tensor", "Tensor_Tensor", "Scalar")
    return any(torch.Tag.pointwise in getattr(getattr(packet, o, None), "tags", ()) for o in overloads)


def _unsupported(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse(func, first_ragged(args, kwargs), "it needs elements that other ranks hold")


def _elementwise(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = first_ragged(args, kwargs)
    out = kwargs.get("out")
    if isinstance(out, RaggedDTensor) and not same_layout(like, out):
        refuse(func, like, f"it would write to {out!r}, which is cut elsewhere, or has another shape")
    values = [_operand(func, like, value) for value in args]
    options = {name: _operand(func, like, value) for name, value in kwargs.items()}
    if func._schema.is_mutable:
        written = args[0] if out is None else out
        if not isinstance(written, RaggedDTensor):
            refuse(func, like, f"it would write to a plain tensor of shape {tuple(written.shape)}")
        func(*values, **options)
        return written
    result = func(*values, **options)
    if isinstance(result, torch.Tensor):
        return wrap(result, like._spec)
    return tuple(wrap(part, like._spec) for part in result)


def _operand(func: OpOverload, like: RaggedDTensor, value: Any) -> Any:
    if isinstance(value, RaggedDTensor):
        if not same_layout(like, value):
            if (value.device_mesh, value.shape) == (like.device_mesh, like.shape):
                why = "is cut elsewhere: give other.detach().redistribute(placements=tensor.placements) instead"
            else:
                why = "has another mesh or shape"
            refuse(func, like, f"the other tensor, {value!r}, {why}")
        return value._local_tensor
    if isinstance(value, torch.Tensor):
        value = scalar_operand(func, like, value)
        # The local of a 0-dim tensor has one dimension, which would win over the other's dtype. With one dimension, in
        # turn, a number on the CPU no longer mixes with elements on another device.
        return value.reshape(1).to(like._local_tensor.device) if like.ndim == 0 else value
    return value


def _fill(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor.fill_(number)``, the number in a 0-dim tensor. By copying it: the local of a 0-dim tensor has one
    dimension, and ``fill_`` takes no value that has."""
    return _elementwise(func if args[1].ndim else aten.copy_.default, args, kwargs)


def _like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RaggedDTensor:
    """A new tensor of the first argument's layout, made of its local."""
    # A memory format is about strides, and changes no values: those of a shard are row-major in any.
    kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return wrap(func(args[0]._local_tensor, *args[1:], **kwargs), args[0]._spec)


def _view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same elements in another shape: a run of the row-major flattened tensor is one whatever shape it is seen in.
    Optimizers flatten parameters to take dot products of them, say, and gradients are viewed back."""
    tensor: RaggedDTensor = args[0]
    local = aten.alias.default(tensor._local_tensor)
    shape = tensor.shape
    if func not in (aten.alias.default, aten.detach.default):  # which are many, and soon done
        shape = func(torch.empty(shape, device="meta"), *args[1:], **kwargs).shape
    if shape.numel() != tensor.numel():
        refuse(func, tensor, f"a view of shape {tuple(shape)}")
    if shape == tensor.shape:
        view = wrap(local, tensor._spec)
    else:
        placement = tensor.placement.viewed(tensor.shape, shape)
        view = tensor.placed(local, placement, shape)
    return return_and_correct_aliasing(func, args, kwargs, view)


def _rows(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor[i]`` and ``tensor[i:j]``: each rank's elements of those rows, aliased."""
    tensor: RaggedDTensor = args[0]
    _, dim, start, end, step = with_defaults(args, 0, None, None, 1)
    if dim not in (0, -tensor.ndim) or step != 1:
        refuse(func, tensor, "only runs of rows (dimension 0, step 1) are in one piece on each rank")
    rows = range(tensor.shape[0])
    if func is aten.select.int:
        first, last, shape = rows[start], rows[start] + 1, tensor.shape[1:]
    else:
        first, last = rows[start:end].start, rows[start:end].stop
        shape = torch.Size((last - first, *tensor.shape[1:]))
    row = math.prod(tensor.shape[1:])
    if (last - first) * row <= 0:
        refuse(func, tensor, "a view without elements")
    counts = tensor.placement.counts(tensor.shape, first * row, last * row)
    begin = max(first * row - tensor.interval[0], 0)
    local = tensor._local_tensor[begin : begin + counts[tensor.device_mesh.get_local_rank()]]
    view = tensor.placed(local, RaggedShard(range(len(shape)), counts), shape)
    return return_and_correct_aliasing(func, args, kwargs, view)


def _complex_view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.view_as_real(tensor)``, whose last dimension, of two, is not cut, and ``torch.view_as_complex`` of such:
    what Adam and others make of complex parameters, and write to."""
    tensor: RaggedDTensor = args[0]
    local, shape = tensor._local_tensor, (*tensor.shape, 2)
    if func is aten.view_as_complex.default:
        if tensor.shape[-1:] != (2,) or len(tensor.placement.dims) == tensor.ndim:
            refuse(func, tensor, "the last dimension must be of two, and not one that may be cut")
        local, shape = local.view(-1, 2), tensor.shape[:-1]
    local = func(local).view(-1)
    view = tensor.placed(local, tensor.placement, shape)
    return return_and_correct_aliasing(func, args, kwargs, view)


def _new(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor.new_empty(size)`` and its kin: of the same layout if `size` is the global shape."""
    tensor, size, *rest = args
    local = tensor._local_tensor
    if torch.Size(size) != tensor.shape:
        return func(local, *args[1:], **kwargs)
    if func is aten.new_empty_strided.default:
        return wrap(aten.new_empty.default(local, local.shape, **kwargs), tensor._spec)
    return wrap(func(local, local.shape, *rest, **kwargs), tensor._spec)


def _copy(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """From a tensor of the same layout, or from a plain tensor that every rank holds whole."""
    target, source, *rest = args
    if not isinstance(target, RaggedDTensor):
        refuse(func, source, f"it would write to a plain tensor of shape {tuple(target.shape)}")
    if isinstance(source, RaggedDTensor) or source.ndim == 0:
        return _elementwise(func, args, kwargs)
    if isinstance(source, DTensor):
        local = _local_of_plain(func, target, source)
    else:
        local = my_slice(source.expand(target.shape), target)
    func(target._local_tensor, local, *rest, **kwargs)
    return target


def _local_of_plain(func: OpOverload, target: RaggedDTensor, source: DTensor) -> torch.Tensor:
    """This rank's elements of what ``DTensor.from_local`` has made of a RaggedDTensor's mesh and placement.

    Of libraries that cut a whole tensor by that placement, those that know PyTorch's own alone leave it whole.
    """
    if not same_layout(target, source):
        remedy = "vescale_compile.ragged.redistribute.to_ragged places it alike"
        refuse(func, target, f"the source is placed by {source.placements}; {remedy}")
    local = source._local_tensor
    if local.shape == target._local_tensor.shape:
        return local
    if local.shape != target.shape:
        shape = tuple(local.shape)
        refuse(func, target, f"the source's local tensor, of shape {shape}, is neither this rank's run nor the whole")
    return my_slice(local, target)


def _write_where(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor[mask] = number``, the mask being of the same layout."""
    target, indices, value, *rest = args
    if not isinstance(target, RaggedDTensor) or len(indices) != 1 or indices[0].dtype != torch.bool:
        refuse(func, first_ragged((*args, *indices), kwargs), "only a mask of the same layout can index it")
    mask = _operand(func, target, indices[0])
    func(target._local_tensor, [mask], scalar_operand(func, target, value), *rest, **kwargs)
    return target


def _draw(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Random values in place: drawn for the whole tensor, so that they are those of the unsharded one."""
    target: RaggedDTensor = args[0]
    func(whole := _empty_whole(target), *args[1:], **kwargs)
    target._local_tensor.copy_(my_slice(whole, target))
    return target


def _draw_like(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A new tensor of random values, drawn for the whole tensor."""
    whole = func(_empty_whole(args[0]), *args[1:], **kwargs)
    return wrap(my_slice(whole, args[0]).clone(), args[0]._spec)


def _eye(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.eye(n, m, out=tensor)``, as ``torch.nn.init.eye_`` calls it."""
    target: RaggedDTensor = kwargs["out"]
    func(*args, out=(whole := _empty_whole(target)))
    target._local_tensor.copy_(my_slice(whole, target))
    return target


def _empty_whole(tensor: RaggedDTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


_HANDLERS: dict[OpOverload, Handler] = {
    **dict.fromkeys(
        (
            aten._to_copy.default,
            aten.clone.default,
            aten.empty_like.default,
            aten.full_like.default,
            aten.ones_like.default,
            aten.zeros_like.default,
        ),
        _like,
    ),
    **dict.fromkeys(
        (
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_full.default,
            aten.new_ones.default,
            aten.new_zeros.default,
        ),
        _new,
    ),
    **dict.fromkeys((aten.fill_.Scalar, aten.zero_.default), _elementwise),
    aten.fill_.Tensor: _fill,
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.detach.default,
            aten.expand.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
            aten.view.default,
        ),
        _view,
    ),
    **dict.fromkeys((aten.select.int, aten.slice.Tensor), _rows),
    **dict.fromkeys((aten.view_as_real.default, aten.view_as_complex.default), _complex_view),
    aten.copy_.default: _copy,
    aten.index_put_.default: _write_where,
    **dict.fromkeys(
        (
            aten.bernoulli_.float,
            aten.cauchy_.default,
            aten.exponential_.default,
            aten.geometric_.default,
            aten.log_normal_.default,
            aten.normal_.default,
            getattr(aten.random_, "from"),
            aten.random_.default,
            aten.random_.to,
            aten.uniform_.default,
        ),
        _draw,
    ),
    **dict.fromkeys(
        (
            aten.rand_like.default,
            aten.randint_like.default,
            aten.randint_like.low_dtype,
            aten.randn_like.default,
        ),
        _draw_like,
    ),
    aten.eye.m_out: _eye,
    aten.eye.out: _eye,
    aten._amp_foreach_non_finite_check_and_unscale_.default: reductions.unscale_and_find_inf,
    aten._foreach_norm.Scalar: reductions.foreach_norm,
    aten._is_any_true.default: reductions.any_here,
    aten.all.default: reductions.all_or_any,
    aten.any.default: reductions.all_or_any,
    aten.dot.default: reductions.dot,
    aten.linalg_vector_norm.default: reductions.vector_norm,
    aten.max.default: reductions.extreme,
    aten.mean.default: reductions.total,
    aten.min.default: reductions.extreme,
    aten.sum.default: reductions.total,
}
