"""Says so where most of a model is one unit: all of it is gathered at once, and nothing can be computed meanwhile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from .runtime.dbuffer import DBuffer

_log = logging.getLogger(__name__)
_MOST = 0.9
_MUCH_BYTES = 1 << 26


def warn_of_one_unit(buffers: Sequence[DBuffer]) -> None:
    """Warns, once, if one of a graph's buffers has more than 90 % of its model, and 64 MiB, and is of no divided block.

    Args:
        buffers: that the graph reads.
    """
    largest = max(buffers, key=lambda buffer: buffer.gathered_bytes)
    model = sum(buffer.gathered_bytes for buffer in largest.model.buffers)
    most = max(_MOST * model, _MUCH_BYTES)
    if not largest.is_part and largest.mesh.size() > 1 and largest.gathered_bytes > most:
        _warn(largest.name, largest.gathered_bytes)


@functools.cache
def _warn(name: str, nbytes: int) -> None:
    _log.warning(
        "backend='vescale': unit %s is nearly the whole model, and is gathered at once (%.0f MB). Units are the "
        "elements of nn.ModuleList, or of an nn.ModuleDict of numbers; where blocks are kept otherwise, in "
        "nn.Sequential, say, call "
        "fully_shard on each block, then on the model.",
        name,
        nbytes / 1e6,
    )
