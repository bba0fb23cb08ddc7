"""ArrivingDTensor: a gradient that a backward has left on its way, as AsyncCollectiveTensor is in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload

from vescale_compile.ragged.dtensor import RaggedDTensor, _Spec, take_foreach_form, wrap
from vescale_compile.runtime.arrivals import Arrival
from vescale_compile.torch_internals.tracing import honor_torch_dispatch


class ArrivingDTensor(RaggedDTensor):
    """A RaggedDTensor whose elements may still be on their way: whatever first asks for them waits for them."""

    _arrival: Arrival | None = None
    _elements: torch.Tensor

    @property
    def _local_tensor(self) -> torch.Tensor:
        if self._arrival is not None:
            self._arrival.wait()
        return self._elements

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        self._elements = local

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedDTensor:
        copied = memo[id(self)] = copy.deepcopy(self._arrived(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._arrived().__reduce_ex__(protocol)

    def _arrived(self) -> RaggedDTensor:
        return wrap(self._local_tensor, self._spec)

    @classmethod
    @torch.compiler.disable  # Dynamo looks at all Python that compiled programs run
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd does it to every gradient that it stores
            return arriving(args[0]._elements, args[0]._spec, args[0]._arrival)
        if _returns_view(func):
            args = (args[0]._arrived(), *args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> ArrivingDTensor:
        plain = RaggedDTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return arriving(plain._local_tensor, plain._spec, None)


def _returns_view(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def arriving(local: torch.Tensor, spec: _Spec, arrival: Arrival | None) -> ArrivingDTensor:
    """:func:`wrap` of elements that come with ``arrival``."""
    result = cast(ArrivingDTensor, wrap(local, spec, kind=ArrivingDTensor))
    result._arrival = arrival
    return result


def in_order_of_arrival(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of the tensors: of those that are there, then of what comes first, and so on."""
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        arrival = tensor._arrival if isinstance(tensor, ArrivingDTensor) else None
        groups.setdefault(-1 if arrival is None or arrival.over else arrival.number, []).append(index)
    return [groups[number] for number in sorted(groups)]


take_foreach_form(ArrivingDTensor)
honor_torch_dispatch(ArrivingDTensor)
