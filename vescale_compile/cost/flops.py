"""Arithmetic of the nodes of an aten graph: matrix products, convolutions and attention, by formula.

Formulas are those registered with :mod:`torch.utils.flop_counter`, where other packages' operators can be registered
too, and some of operators that it knows nothing of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from vescale_compile.rng_calls import example_values
from vescale_compile.torch_internals.tracing import size_hint

_log = logging.getLogger(__name__)
_aten = torch.ops.aten

_warned: set[Any] = set()

# Operators without a formula of their own, and the one whose formula holds for them.
_LIKE: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
    _aten.addmm_: _aten.addmm,
    _aten.baddbmm_: _aten.baddbmm,
}


def flops(node: fx.Node, formulas: Mapping[Any, Callable[..., int]]) -> int:
    """Floating-point operations of a node, a multiplication and an addition counted as two.

    A causal attention does half of what its formula counts; of a mask that is a program, as flex attention's, nothing
    is known. 0 without a formula, or with one that raises.

    Args:
        node: with ``meta["val"]``, as its arguments.
        formulas: those of :mod:`torch.utils.flop_counter`.
    """
    if not isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return 0
    operator = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    formula = formulas.get(_LIKE.get(operator, operator)) or _OTHERS.get(node.target.name())
    if formula is None:
        return 0
    try:
        count = _evaluated(formula, node)
    except Exception as error:  # anybody's code, which assumes more of its arguments than the operator does
        _warn_raising(operator, error)
        return 0
    return count // 2 if _is_causal(node) else count


def depends_on_values(node: fx.Node) -> bool:
    """Whether how much a node computes is in the values of its arguments: rows of each group, a mask."""
    return not isinstance(node.target, OpOverload) or "grouped_mm" in node.target.name()


def _evaluated(formula: Callable[..., int], node: fx.Node) -> int:
    if isinstance(node.target, HigherOrderOperator):  # programs are among its arguments, behind the tensors
        args = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in node.args]
        return size_hint(formula(*_with_all_heads(args), out_val=node.meta.get("val")))
    args = example_values(node.args)
    if "scaled_dot_product" in str(node.target):
        args = _with_all_heads(args)
    return size_hint(formula(*args, **example_values(node.kwargs), out_val=node.meta.get("val")))


def _with_all_heads(args: Sequence[Any]) -> list[Any]:
    """An attention's arguments, with as many heads for keys and values as for queries: older formulas want that."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]
    heads = max((tensor.shape[1] for tensor in tensors), default=1)
    return [
        arg[:, :1].expand(-1, heads, -1, -1) if any(arg is each for each in tensors) and arg.shape[1] != heads else arg
        for arg in args
    ]


def _is_causal(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    if "is_causal" in node.kwargs:
        return bool(node.kwargs["is_causal"])
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index("is_causal") if "is_causal" in names else len(node.args)
    return bool(node.args[place]) if place < len(node.args) else False


def _product(a: Tensor, b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    return 2 * out_val.numel() * a.shape[-1]


def _product_into(out: Tensor, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * out.numel() * a.shape[-1]


def _grouped_product(a: Tensor, b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Of two matrices, groups are parts of the dimension that is summed over: a weight's gradient."""
    return 2 * a.numel() * b.shape[-1] if a.dim() == b.dim() == 2 else _product(a, b, out_val=out_val)


def _grouped_backward(rows: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """A product for the gradient of the rows, and one for that of the weight."""
    return 2 * (2 * rows.numel() * weight.shape[-1])


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(out.shape, query.shape, key.shape, value.shape)


_OTHERS: dict[str, Callable[..., int]] = {
    "vescale::matmul_into": _product_into,
    "aten::_scaled_mm_v2": _product,
    "aten::_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm": _grouped_product,
    "aten::_scaled_grouped_mm_v2": _grouped_product,
    "transformers::grouped_mm_fallback": _product,  # experts of Hugging Face's models in float32
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
    "flex_attention": _attention,  # PyTorch 2.11 has no formula for it
    "flex_attention_backward": _attention_backward,
}


def _warn_raising(operator: Any, error: Exception) -> None:
    """Once for each operator."""
    if operator in _warned:
        return
    _warned.add(operator)
    _log.warning(
        "backend='vescale': the formula of %s, registered with torch.utils.flop_counter, raises %s: %s. Its time is "
        "predicted from its memory traffic alone.",
        operator,
        type(error).__name__,
        error,
    )
