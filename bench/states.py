"""What optimizers keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of memory that optimizers' states hold on this rank; memory that several share counts once."""
    held: dict[int, int] = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                for tensor in _plain_tensors(value):
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def _plain_tensors(value: object) -> Iterator[Tensor]:
    """What a tensor wraps: the local part of a sharded one, the codes and scales of a quantized one."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
