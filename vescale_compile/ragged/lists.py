"""Foreach and fused operations on lists with RaggedDTensors: optimizer steps, on the local tensors alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from vescale_compile.ragged.arriving import in_order_of_arrival
from vescale_compile.ragged.dtensor import RaggedDTensor, wrap
from vescale_compile.ragged.local import first_ragged, is_partial, local_of, refuse, same_layout, scalar_operand

aten = torch.ops.aten

# In place, and the same for every element. Their results are correctly rounded, so an element's does not depend on
# where in a tensor it lies, as that of sigmoid does on CPUs, in the last bit.
_SAME_FOR_ALL = frozenset(
    {
        aten._foreach_zero_.default,
        aten._foreach_add_.Scalar,
        aten._foreach_sub_.Scalar,
        aten._foreach_mul_.Scalar,
        aten._foreach_mul_.Tensor,
        aten._foreach_div_.Scalar,
        aten._foreach_div_.Tensor,
    }
)


def run_on_lists(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """An elementwise operation on lists: the i-th elements of all lists belong together.

    In place it begins with the elements that are there, and goes on as others arrive.

    At each index the tensors must be distributed alike: RaggedDTensors of one layout, DTensors of one
    placement (not Partial), or plain tensors. So a list may mix sharded and plain parameters. Tensors that
    are only read may also be 0-dim and plain, as step counters and learning rates are.
    """
    like = first_ragged(args, kwargs)
    anchors: list[torch.Tensor] = next(value for value in args if _is_tensor_list(value))
    values = []
    for parameter, value in zip(func._schema.arguments, args, strict=False):
        if _is_tensor_list(value):
            # Fused Adagrad's schema calls its step counters, plain numbers, written.
            written = parameter.alias_info is not None and parameter.name != "state_steps"
            value = [_element(func, like, *pair, written) for pair in zip(anchors, value, strict=True)]
        values.append(_single(func, like, value))
    options = {name: _single(func, like, value) for name, value in kwargs.items()}
    if func._schema.is_mutable:
        for part in _as_they_arrive(values):
            _run(func, part, options)
        return None
    results = _run(func, values, options)
    return [_like_anchor(result, anchor) for result, anchor in zip(results, anchors, strict=True)]


def _as_they_arrive(values: list[Any]) -> list[list[Any]]:
    """The arguments, cut where some elements come later than others."""
    lists = [value for value in values if _is_tensor_list(value)]
    parts = next((parts for each in lists if len(parts := in_order_of_arrival(each)) > 1), None)
    if parts is None:
        return [values]
    whole = len(lists[0])
    cut = [isinstance(value, list | tuple) and len(value) == whole for value in values]  # tensors, or numbers
    return [
        [[value[i] for i in part] if is_cut else value for value, is_cut in zip(values, cut, strict=True)]
        for part in parts
    ]


def _run(func: OpOverload, values: list[Any], options: dict[str, Any]) -> Any:
    """Waits for the elements, and runs the operation on the local tensors."""
    local = [[local_of(item) for item in value] if _is_tensor_list(value) else value for value in values]
    if func in _SAME_FOR_ALL:
        # As writing would, which ranks do that hold elements of these: all must see that values have changed.
        increment_version([tensor for tensor in local[0] if tensor.numel() == 0])
        local[0] = coalesced(local[0])
    return func(*local, **options)


def coalesced(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of `tensors` as fewer tensors that alias them, for operations that treat all elements alike.

    Flat tensors that follow each other in one storage become one: a unit's gradients, say, which lie in one buffer.
    Only those that touch. What lies in a gap is padding, or another tensor that the caller left out on purpose, and
    nothing here tells which. Empty tensors are left out, unless all are, and the order is that of memory.
    """
    held = [tensor for tensor in tensors if tensor.numel() > 0]
    storages = [tensor.untyped_storage()._cdata for tensor in held]
    if len(set(storages)) == len(held):
        return held or list(tensors)  # PyTorch refuses empty lists
    runs: list[list[torch.Tensor]] = []
    for _, tensor in sorted(zip(storages, held, strict=True), key=lambda each: (each[0], each[1].storage_offset())):
        if runs and _touch(runs[-1][-1], tensor):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return [
        run[0].as_strided((sum(tensor.numel() for tensor in run),), (1,)) if len(run) > 1 else run[0] for run in runs
    ]


def _touch(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors, the second not before the first, are a flat tensor in two pieces."""
    return (
        first.dim() == second.dim() == 1
        and first.dtype == second.dtype
        and first.storage_offset() + first.numel() == second.storage_offset()
        and first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and first.is_contiguous()
        and second.is_contiguous()
    )


def _is_tensor_list(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def _element(
    func: OpOverload, like: RaggedDTensor, anchor: torch.Tensor, item: torch.Tensor, written: bool
) -> torch.Tensor:
    """What stands for ``item`` in the operation: itself, if it is distributed as the list's first is at its place."""
    if isinstance(anchor, RaggedDTensor) and isinstance(item, RaggedDTensor) and anchor._spec is item._spec:
        return item  # the usual case first: optimizers step through hundreds of tensors
    if not isinstance(anchor, DTensor):
        if isinstance(item, DTensor):
            refuse(func, like, f"the lists pair a plain tensor of shape {tuple(anchor.shape)} with {item!r}")
        return item
    if isinstance(anchor, RaggedDTensor):
        like = anchor
    elif is_partial(anchor):
        refuse(func, like, f"the list also holds a tensor placed by {anchor.placements}; redistribute it")
    if same_layout(anchor, item):
        if isinstance(anchor, RaggedDTensor) and isinstance(item, RaggedDTensor):
            item.share_mesh(anchor)  # of a loaded state: to compare their ranks once is enough
        return item
    if written:
        found = f"{item!r}, which is" if isinstance(item, DTensor) else f"a plain tensor of shape {tuple(item.shape)},"
        refuse(func, like, f"it would write to {found} placed otherwise; redistribute it")
    return scalar_operand(func, like, item)


def _single(func: OpOverload, like: RaggedDTensor, value: Any) -> Any:
    """A learning rate, or a scale or flag of AMP, which come with one element in one dimension."""
    if not isinstance(value, torch.Tensor) or (not isinstance(value, DTensor) and value.numel() == 1):
        return value
    return scalar_operand(func, like, value)


def _like_anchor(result: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    if isinstance(anchor, RaggedDTensor):
        return wrap(result, anchor._spec)
    if isinstance(anchor, DTensor):
        mesh, placements = anchor.device_mesh, anchor.placements
        return DTensor.from_local(result, mesh, placements, shape=anchor.shape, stride=anchor.stride())
    return result
