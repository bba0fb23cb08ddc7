"""The units that shards are of: a graph is given a shard alone, and serves every unit that is laid out alike."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from torch import Tensor

from ..torch_internals.tracing import is_shape

if TYPE_CHECKING:
    from .dbuffer import DBuffer

_buffers: WeakValueDictionary[int, DBuffer] = WeakValueDictionary()
"""By the addresses of their shards."""


def note_buffer(buffer: DBuffer) -> None:
    """Has :func:`buffer_of` know it by the shard that it has now."""
    if not is_shape(buffer.shard):
        _buffers[buffer.shard.data_ptr()] = buffer


def buffer_of(shard: Tensor) -> DBuffer | None:
    """The buffer whose shard it is; None if it is nobody's, or only lies where one was."""
    buffer = _buffers.get(shard.data_ptr())
    own = buffer is not None and buffer.shard.data_ptr() == shard.data_ptr() and buffer.shard.dtype == shard.dtype
    return buffer if own else None
