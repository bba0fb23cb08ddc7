"""``no_sync``: gradient accumulation with one reduction."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from torch import nn

from .runtime.dbuffer import DBuffer, Peers
from .sharded_module import buffers_in, uncompiled


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Accumulates gradients over micro-batches without reducing them, as DistributedDataParallel.no_sync.

    What counts is where the forward runs, and the last backward before the optimizer's step should be of one outside:
    what comes after it is reduced in the next step. Backwards of forwards inside keep their gradient on each rank,
    summed and not sharded (world_size times a shard's memory, in the reduction's dtype). The next backward of a forward
    outside adds the sum to its own and reduces both, once for each unit and when the schedule says so; last come the
    units that it did not use itself. Until then ``.grad`` does not change. ``zero_grad()`` of the sharded module, or of
    a part of it, forgets what was accumulated for it; that of an optimizer, of what ``torch.compile`` returned or of a
    module around it does not. Hooks of parameters run where gradients arrive, with the sums. A backward that raises
    leaves what it had computed in the sums; one that is for some of a unit's parameters only
    (``backward(inputs=...)``), or for none's ``.grad`` (``torch.autograd.grad``), raises where the unit accumulates.
    Graphs that were compiled before the first ``no_sync`` are compiled again.

    Args:
        module: a sharded module, compiled or not; all units in it are affected.

    Raises:
        TypeError: it is no module.
        ValueError: no module in it is sharded, or a unit of it has parameters of other modules, too.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"no_sync takes the module whose gradients accumulate, sharded by fully_shard: got {module!r}")
    buffers = tuple(buffers_in(module))
    syncs = dict.fromkeys(buffer.sync for buffer in buffers)  # in this order gradients are reduced, on every rank
    if not syncs:
        raise ValueError("no_sync: the module has no sharded parameters; call fully_shard on it first")
    _check_is_of_whole_units(uncompiled(module), buffers)
    earlier = dict.fromkeys(sync.peers for sync in syncs)
    together = dict.fromkeys(itertools.chain(buffers, *(peers.buffers() for peers in earlier)))
    peers = Peers(together)
    before = {sync: sync.enabled for sync in syncs}
    try:
        for buffer in together:
            buffer.sync.peers = peers
        for sync in syncs:
            sync.set_enabled(False)
        yield
    finally:
        for sync, enabled in before.items():
            sync.set_enabled(enabled)


def _check_is_of_whole_units(module: nn.Module, buffers: Sequence[DBuffer]) -> None:
    """The gradients of a unit accumulate, or are reduced, together."""
    models, syncs = {buffer.model for buffer in buffers}, {buffer.sync for buffer in buffers}
    if all(model.root is module for model in models):
        return  # called for each micro-batch
    trained = {param for model in models if model.root for param in model.root.parameters() if param.requires_grad}
    others = trained.difference(module.parameters())
    for buffer in (each for model in models for each in model.buffers if each.sync in syncs):
        for slot, param in zip(buffer.slots, buffer.params, strict=True):
            if param in others:
                raise ValueError(
                    f"[rank {buffer.rank}] no_sync: the gradients of parameter {slot.name!r} would accumulate too, "
                    f"which is not in the module, but in one unit with parameters of it ({buffer.name}). Call "
                    "fully_shard on the module before the model, or no_sync on the model"
                )
