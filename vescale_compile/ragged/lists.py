"""Foreach and fused operations on lists with RaggedDTensors: optimizer steps, on the local tensors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from vescale_compile.ragged.dtensor import RaggedDTensor, wrap
from vescale_compile.ragged.local import first_ragged, is_partial, refuse, same_layout, scalar_operand


def run_on_lists(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """An elementwise operation on lists: the i-th elements of all lists belong together.

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
    results = func(*values, **options)
    if func._schema.is_mutable:
        return None
    return [_like_anchor(result, anchor) for result, anchor in zip(results, anchors, strict=True)]


def _is_tensor_list(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def _element(
    func: OpOverload, like: RaggedDTensor, anchor: torch.Tensor, item: torch.Tensor, written: bool
) -> torch.Tensor:
    if isinstance(anchor, RaggedDTensor) and isinstance(item, RaggedDTensor) and anchor._spec is item._spec:
        return item._local_tensor  # the usual case first: optimizers step through hundreds of tensors
    if not isinstance(anchor, DTensor):
        if isinstance(item, DTensor):
            refuse(func, like, f"the lists pair a plain tensor of shape {tuple(anchor.shape)} with {item!r}")
        return item
    if isinstance(anchor, RaggedDTensor):
        like = anchor
    elif is_partial(anchor):
        refuse(func, like, f"the list also holds a tensor placed by {anchor.placements}; redistribute it")
    if same_layout(anchor, item):
        return item._local_tensor  # type: ignore[attr-defined]
    if written:
        refuse(func, like, f"it would write to {item!r}, which is placed otherwise; redistribute it")
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
