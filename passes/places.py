"""Places in gradient buffers, as the operators that compute gradients must see them.

A gradient often reaches its parameter through views: a matrix product, transposed, reshaped. To write the product
itself where the gradient belongs, the place is viewed the opposite way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from .edit import call, value_of

_aten = torch.ops.aten
_RESHAPES = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.unsqueeze.default,
    }
)


@dataclass(frozen=True)
class Place:
    """Part of a buffer, viewed.

    Attributes:
        buffer: the node that is the whole buffer.
        offset: of the first element.
        unit: whose gradient belongs there, by its ordinal.
        shape: in which the elements lie contiguously.
        steps: views to take of that, one after another.
        layout: a meta tensor laid out like the result.
    """

    buffer: fx.Node
    offset: int
    unit: int
    shape: tuple[int, ...]
    steps: tuple[tuple[OpOverload, tuple[Any, ...]], ...]
    layout: Tensor

    @staticmethod
    def of(buffer: fx.Node, offset: int, unit: int, shape: torch.Size) -> Place:
        layout = torch.empty(shape, dtype=buffer.meta["val"].dtype, device="meta")
        return Place(buffer, offset, unit, tuple(shape), (), layout)

    def before(self, view: fx.Node) -> Place | None:
        """Where the argument of ``view`` must be written for its result to lie here; None if it is no view, or if
        its argument can't be laid out so."""
        source = value_of(view.all_input_nodes[0]) if view.all_input_nodes else None
        if source is None or not all(isinstance(size, int) for size in source.shape):
            return None
        if view.target is _aten.permute.default:
            dims = [dim % source.dim() for dim in view.args[1]]  # type: ignore[union-attr, operator]
            return self._then(_aten.permute.default, sorted(range(len(dims)), key=dims.__getitem__))
        if view.target is _aten.t.default:
            return self._then(_aten.permute.default, [1, 0] if source.dim() == 2 else [0])
        if view.target is _aten.transpose.int:
            return self._then(_aten.transpose.int, *view.args[1:])
        if view.target is _aten.clone.default:
            return self  # a copy into another memory format, which its reader no longer needs
        if view.target in _RESHAPES:
            try:
                return self._then(_aten.view.default, list(source.shape))
            except (RuntimeError, ValueError):  # not without a copy; what fake tensors raise is a ValueError
                return None
        return None

    def _then(self, target: OpOverload, *args: Any) -> Place:
        return replace(self, steps=(*self.steps, (target, args)), layout=target(self.layout, *args))

    @property
    def aligned(self) -> bool:
        """Whether the place begins where matrix libraries have their fast paths."""
        return self.offset * self.layout.itemsize % 16 == 0

    def insert(self) -> fx.Node:
        """A node for the place, at its graph's insertion point."""
        graph, numel = self.buffer.graph, self.layout.numel()
        node = call(graph, _aten.slice.Tensor, self.buffer, 0, self.offset, self.offset + numel)
        node = call(graph, _aten.view.default, node, list(self.shape))
        for target, args in self.steps:
            node = call(graph, target, node, *args)
        return node

    def fits(self, value: Tensor | None) -> bool:
        """Whether an operator whose result is ``value`` can write it here."""
        return value is not None and value.shape == self.layout.shape and value.dtype == self.layout.dtype
