"""The backward that is running: the outermost, where one runs inside another.

Reentrant checkpointing (``use_reentrant=True``) runs a backward for each region inside the model's own. Autograd tells
each its end, and none of them of which it is a part.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from torch import Tensor

from ..torch_internals.autograd import after_backward

if TYPE_CHECKING:
    from .courses import Course
    from .dbuffer import DBuffer


class Backward:
    """What is to be done when it has run.

    Attributes:
        aside: by buffer, reduced gradients by index of the parameter, which it has not come to.
        course: of its graphs that take turns; None if it has not come to one.
    """

    def __init__(self) -> None:
        self.aside: dict[DBuffer, dict[int, Tensor]] = {}
        self.course: Course | None = None
        self._at_end: dict[Hashable, Callable[[], None]] = {}

    def at_end(self, key: Hashable, function: Callable[[], None]) -> None:
        """Has ``function`` called, once for each ``key``."""
        self._at_end.setdefault(key, function)

    def end(self) -> None:
        """Does what is to be done, and what that adds."""
        while self._at_end:
            self._at_end.pop(next(iter(self._at_end)))()


class _Running(threading.local):
    backward: Callable[[], Backward | None] = staticmethod(lambda: None)
    goes_on: Callable[[], object] = staticmethod(lambda: None)


_running = _Running()


def running_backward() -> Backward:
    """That of this thread, which a backward is running in. What first asks in it must not be in one inside."""
    backward = _running.backward() if _running.goes_on() else None
    if backward is None:
        backward = Backward()
        _running.backward, _running.goes_on = weakref.ref(backward), after_backward(backward.end)
    return backward
