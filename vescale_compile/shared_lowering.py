"""One process of a host lowers a graph; the others wait, and find its code in Inductor's cache.

Ranks compile equal graphs. Lowered side by side, each would take a core for the same minute, and as many times the
memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import fx

from .torch_internals.inductor import caches_generated_code, inductor_cache_folder

_log = logging.getLogger(__name__)

# Who has lowered a graph waits at least a deadline for the others: who gave up on it after no more than that, and began
# then, might be missing.
_PATIENCE = 4


@contextlib.contextmanager
def lowered_once(gm: fx.GraphModule, inputs: Sequence[Any], version: str, deadline: float) -> Iterator[float]:
    """Inside it this process alone, of those with this cache folder, lowers the graph ``gm`` of this ``version``; for
    which it has waited so many seconds.

    A process that dies gives way to the next. One that hangs does not: after ``_PATIENCE`` times the ``deadline`` of
    the agreement that follows, in seconds, the graph is lowered beside it, and the agreement says who is missing.
    Nobody waits where the graph has been lowered before, where Inductor's cache is off, where its folder's files can't
    be locked, or on GPUs, of which each rank's graph names its own.
    """
    if not caches_generated_code() or any(tensor.device.type != "cpu" for tensor in _tensors(inputs)):
        yield 0.0
        return
    began = time.monotonic()
    lowered = _record_of(gm, inputs, version)
    lock = filelock.FileLock(lowered.with_suffix(".lock"))
    if not lowered.exists():
        try:
            lock.acquire(timeout=_PATIENCE * deadline)
        except filelock.Timeout:
            pass
        except (OSError, NotImplementedError) as error:  # some network file systems have no locks
            _warn_of_no_locks(lowered.parent, str(error))
    if lowered.exists():
        lock.release()  # what is in the cache, all may read at once
    try:
        yield time.monotonic() - began
        lowered.touch()
    finally:
        lock.release()


def _record_of(gm: fx.GraphModule, inputs: Sequence[Any], version: str) -> Path:
    """The file that is there once the graph has been lowered."""
    tensors = [(each.device, each.dtype, each.shape) for each in _tensors(inputs)]
    compiler = (torch.__version__, version, torch.backends.cpu.get_cpu_capability())
    digest = hashlib.sha256(repr((compiler, gm.code, tensors)).encode()).hexdigest()
    folder = Path(inductor_cache_folder(), "vescale_lowered")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / digest


def _tensors(inputs: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in inputs if isinstance(each, torch.Tensor)]


@functools.cache
def _warn_of_no_locks(folder: Path, error: str) -> None:
    _log.warning(
        "backend='vescale': files in %s can't be locked (%s), so all ranks of this host lower the same graphs at once, "
        "which takes a core and the memory for each. Have TORCHINDUCTOR_CACHE_DIR name a folder on a local disk.",
        folder,
        error,
    )
