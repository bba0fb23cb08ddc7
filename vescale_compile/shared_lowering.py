"""One process of a host lowers a graph; the others wait, and find its code in Inductor's cache.

Ranks compile equal graphs. Lowered side by side, each would take a core for the same minute, and as many times the
memory.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import fx

from .torch_internals import caches_generated_code, inductor_cache_folder


@contextlib.contextmanager
def lowered_once(gm: fx.GraphModule, inputs: Sequence[Any], deadline: float) -> Iterator[None]:
    """Inside it this process alone, of those with this cache folder, lowers the graph ``gm``.

    A process that dies gives way to the next. One that takes longer than ``deadline`` seconds is not waited for: the
    graph is then lowered beside it, which is only slower. Ranks on different devices, whose code differs, don't wait
    for one another, and nobody does where Inductor's cache is off.
    """
    if not caches_generated_code():
        yield
        return
    lock = filelock.FileLock(_lock_file(gm, inputs))
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=deadline)
    try:
        yield
    finally:
        lock.release()


def _lock_file(gm: fx.GraphModule, inputs: Sequence[Any]) -> Path:
    tensors = [(each.device, each.dtype, each.shape) for each in inputs if isinstance(each, torch.Tensor)]
    digest = hashlib.sha256(repr((gm.code, tensors)).encode()).hexdigest()
    folder = Path(inductor_cache_folder(), "vescale_locks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest}.lock"
