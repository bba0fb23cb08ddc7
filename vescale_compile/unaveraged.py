"""Warns of trained parameters that no collective averages: added after ``fully_shard``, they differ between ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn

from .ragged.dtensor import RaggedDTensor

_log = logging.getLogger(__name__)


def leave_alone(params: Iterable[nn.Parameter]) -> None:
    """Marks parameters whose gradients the user does not want averaged."""
    for param in params:
        param._vescale_ignored = True  # type: ignore[attr-defined]


def warn_of_unaveraged(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Warns, once for each, of trained parameters that a graph of a sharded model reads and nothing has sharded."""
    for placeholder, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        plain = isinstance(value, nn.Parameter) and not isinstance(value, RaggedDTensor)
        if plain and value.requires_grad and not hasattr(value, "_vescale_ignored"):
            _warn(placeholder.name, tuple(value.shape))


@functools.cache
def _warn(name: str, shape: tuple[int, ...]) -> None:
    _log.warning(
        "backend='vescale': %s, a parameter of shape %s, is trained beside sharded ones and is not sharded itself: its "
        "gradient is not averaged, and it will differ from rank to rank. If it was added after fully_shard, call "
        "fully_shard on its module; if it is to stay as it is, pass it in fully_shard(ignored_params=...).",
        name,
        shape,
    )
