"""What a profiled step allocated, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch._C._profiler import _EventType


def highest_rise(tree: Iterable[Any], device_type: str) -> int:
    """How far the bytes allocated by a profiled step rose above where they stood at its start.

    ``tree`` is the profile's event tree. Only what the step itself allocated counts: a block from before it that it
    frees has the size, if any, that an earlier profile of this process saw at its address.
    """
    live: dict[int, int] = {}
    most = now = 0
    for event in sorted(_allocations(tree, device_type), key=lambda event: event.start_time_ns):
        fields = event.typed[1]
        if fields.alloc_size > 0:
            live[fields.ptr] = fields.alloc_size
            now += fields.alloc_size
        else:
            now -= live.pop(fields.ptr, 0)
        most = max(most, now)
    return most


def _allocations(tree: Iterable[Any], device_type: str) -> Iterator[Any]:
    for event in tree:
        tag, fields = event.typed
        if tag == _EventType.Allocation and fields.device.type == device_type:
            yield event
        yield from _allocations(event.children, device_type)
