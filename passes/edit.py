"""Inserting nodes into graphs of aten operators, with the example values that lowering reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from ..schemas import has_results
from ..torch_internals.tracing import fake_mode_of, size_hint


def call(graph: fx.Graph, target: OpOverload, *args: Any, mark: object = None, **kwargs: Any) -> fx.Node:
    """Inserts a call at the graph's insertion point; its example value, if any, is computed from its arguments'.

    Args:
        mark: what passes are to know of the node, put under ``meta["vescale"]``.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = _example(graph, target, args, kwargs) if has_results(target) else None
    if mark is not None:
        node.meta["vescale"] = mark
    return node


def _example(graph: fx.Graph, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values, named = tree_map_only(fx.Node, lambda arg: arg.meta["val"], (args, kwargs))
    with fake_mode_of(graph):
        return target(*values, **named)


def order_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Each node's place in the order of execution."""
    return {node: place for place, node in enumerate(graph.nodes)}


def value_of(node: fx.Node) -> Tensor | None:
    """The node's example value, if its result is one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def nbytes_of(node: fx.Node) -> int:
    """Bytes of the node's results; of symbolic sizes, those at capture."""
    return sum(size_hint(value.numel()) * value.dtype.itemsize for value in _results_of(node))


def numel_of(node: fx.Node) -> int:
    """Elements of the node's results; of symbolic sizes, those at capture."""
    return sum(size_hint(value.numel()) for value in _results_of(node))


def _results_of(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [value] if isinstance(value, Tensor) else [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def allocate(graph: fx.Graph, numel: int, *, like: Tensor, mark: object, dtype: torch.dtype | None = None) -> fx.Node:
    """Inserts an uninitialized buffer of ``numel`` elements, of the device and, if none is given, dtype of ``like``."""
    size = [numel]
    dtype = dtype or like.dtype
    return call(graph, torch.ops.aten.empty.memory_format, size, dtype=dtype, device=like.device, mark=mark)
