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
def lowered_once(gm: fx.GraphModule, inputs: Sequence[Any], version: str, deadline: float) -> Iterator[None]:
    """Inside it this process alone, of those with this cache folder, lowers the graph ``gm`` of this ``version``.

    A process that dies gives way to the next. One that takes longer than ``deadline`` seconds is not waited for: the
    graph is then lowered beside it, which is only slower. Nobody waits where the graph has been lowered before, or
    where Inductor's cache is off; and ranks on different devices, whose code differs, don't wait for one another.
    """
    if not caches_generated_code():
        yield
        return
    lowered = _record_of(gm, inputs, version)
    lock = filelock.FileLock(lowered.with_suffix(".lock"))
    if not lowered.exists():
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=deadline)
    if lowered.exists():
        lock.release()  # what is in the cache, all may read at once
    try:
        yield
        lowered.touch()
    finally:
        lock.release()


def _record_of(gm: fx.GraphModule, inputs: Sequence[Any], version: str) -> Path:
    """The file that is there once the graph has been lowered."""
    tensors = [(each.device, each.dtype, each.shape) for each in inputs if isinstance(each, torch.Tensor)]
    compiler = (torch.__version__, version, torch.backends.cpu.get_cpu_capability())
    digest = hashlib.sha256(repr((compiler, gm.code, tensors)).encode()).hexdigest()
    folder = Path(inductor_cache_folder(), "vescale_lowered")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / digest
