"""``no_sync``: gradient accumulation with one reduction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from .sharded_module import buffers_in


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulates gradients over micro-batches without reducing them, as DistributedDataParallel.no_sync.

    What counts is where the forward runs. Backwards of forwards inside keep their gradient on each rank, summed
    and not sharded (world_size times a shard's memory, in the reduction's dtype). The next backward of a forward
    outside adds its own and reduces the sum, once for each unit, units that it did not use itself included; until
    then ``.grad`` does not change. ``module.zero_grad()`` forgets what was accumulated, an optimizer's does not.

    Args:
        module: a sharded module, compiled or not; all units in it are affected.

    Raises:
        ValueError: no module in it is sharded.
    """
    buffers = tuple(buffers_in(module))
    syncs = {buffer.sync for buffer in buffers}
    if not syncs:
        raise ValueError("no_sync: the module has no sharded parameters; call fully_shard on it first")
    before = {sync: sync.enabled for sync in syncs}
    try:
        for sync in syncs:
            sync.peers = buffers
            sync.set_enabled(False)
        yield
    finally:
        for sync, enabled in before.items():
            sync.set_enabled(enabled)
