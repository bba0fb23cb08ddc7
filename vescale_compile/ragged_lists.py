"""Foreach and fused operations on lists with RaggedDTensors: optimizer steps, on the local tensors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from vescale_compile.ragged_dtensor import RaggedDTensor, wrap
from vescale_compile.ragged_local import first_ragged, refuse, same_layout, scalar_operand


def run_on_lists(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor] | None:
    """An elementwise operation on lists: the i-th elements of all lists belong together.

    At each index the tensors must be distributed alike: RaggedDTensors of one layout, DTensors of one placement (not
    Partial), or plain tensors. So a list may mix sharded and plain parameters. Tensors that are only read may also
    be 0-dim and plain, as step counters and learning rates are.
    """
    like = first_ragged(args, kwargs)
    anchors: list[torch.Tensor] = next(value for value in args if isinstance(value, list | tuple))
    parameters = func._schema.arguments

    def local(index_or_name: int | str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # Scales and flags of AMP come with one element in one dimension.
            return (
                value
                if type(value) is torch.Tensor and value.numel() == 1
                else scalar_operand(func, like, value)
            )
        if not isinstance(value, list | tuple) or not value or not isinstance(value[0], torch.Tensor):
            return value
        parameter = next(p for i, p in enumerate(parameters) if index_or_name in (i, p.name))
        written = parameter.alias_info is not None and parameter.name != "state_steps"
        return [_element(func, like, *pair, written) for pair in zip(anchors, value, strict=True)]

    results = func(
        *(local(index, value) for index, value in enumerate(args)),
        **{name: local(name, value) for name, value in kwargs.items()},
    )
    if func._schema.is_mutable:
        return None
    return [_like_anchor(result, anchor) for result, anchor in zip(results, anchors, strict=True)]


def _element(
    func: OpOverload, like: RaggedDTensor, anchor: torch.Tensor, item: torch.Tensor, written: bool
) -> torch.Tensor:
    if not isinstance(anchor, DTensor):
        if isinstance(item, DTensor):
            refuse(func, like, f"the lists pair a plain tensor of shape {tuple(anchor.shape)} with {item!r}")
        return item
    if isinstance(anchor, RaggedDTensor):
        like = anchor
    elif any(placement.is_partial() for placement in anchor.placements):
        refuse(
            func, like, f"the list also holds a tensor placed by {anchor.placements}; redistribute it first"
        )
    if same_layout(anchor, item):
        return item._local_tensor  # type: ignore[attr-defined]
    if written:
        refuse(
            func, like, f"it would write to {item!r}, which is placed otherwise; redistribute it"
        )
    return scalar_operand(func, like, item)


def _like_anchor(result: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    if isinstance(anchor, RaggedDTensor):
        return wrap(result, anchor._spec)
    if isinstance(anchor, DTensor):
        return DTensor.from_local(
            result, anchor.device_mesh, anchor.placements, shape=anchor.shape, stride=anchor.stride()
        )
    return result
