"""Room for Python's frames, without which deep calls map and unmap memory all the time.

CPython keeps a thread's frames in chunks of 16 KiB: the call that needs another chunk maps it, and its return unmaps it
(``_PyThreadState_BumpFramePointerSlow`` and ``_PyThreadState_PopFrame`` in CPython's pystate.c). A loop of calls that
begins at the end of a chunk does so each time, and the calls of a compiler are deep. Tried on CPython 3.11 to 3.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_SLOTS = (1 << 16) + 1  # of 8 bytes. A chunk is the next power of two, so that nearly half of it is left

P = ParamSpec("P")
R = TypeVar("R")


def roomy(call: Callable[P, R]) -> Callable[P, R]:
    """``call``, whose frames and those of all that it calls have half a mebibyte in one chunk."""

    def in_a_large_chunk(*args: P.args, **kwargs: P.kwargs) -> R:
        return call(*args, **kwargs)

    in_a_large_chunk.__code__ = in_a_large_chunk.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(call)(in_a_large_chunk)
