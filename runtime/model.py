"""What a model takes of a rank's memory beside one of its graphs.

A model may run as several graphs: Dynamo breaks its forward, or its layers are compiled one by one. Each runs beside
the shards of all units, beside what the forwards before it keep for their backwards, and its backward beside the
gradients of graphs after it. Shards and gradients are the same on every rank. What forwards keep is known as far as
they have run, and may differ between ranks: it limits what a graph takes without need, and nothing is refused for it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

if TYPE_CHECKING:
    from .dbuffer import DBuffer


class Model:
    """Buffers that were sharded as one model, and the forwards that have read them and wait for their backwards."""

    def __init__(self, buffers: Iterable[DBuffer] = (), root: nn.Module | None = None) -> None:
        self.buffers = WeakSet(buffers)
        self._root = weakref.ref(root) if root is not None else None
        self.forwards: WeakSet[Forward] = WeakSet()
        self.forward = 0  # number of its root's last forward

    @property
    def root(self) -> nn.Module | None:
        """The module that was sharded; None of a copy of a part of it, and when it is gone."""
        return self._root() if self._root is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        """One of no buffers and no root: their copies are added as they are made."""
        return Model()

    def belongs_to(self, root: nn.Module) -> None:
        """Says which module was sharded."""
        self._root = weakref.ref(root)


class Forward:
    """A call of a graph's forward, or a gather in uncompiled code. Where a parameter is trained, autograd keeps it as
    long as its backward may still run.

    Attributes:
        left: bytes of its results and of what it keeps for its backward; in uncompiled code, of the gathered unit.
        buffers: of the units that it read.
        compiled: whether it is a graph's.
    """

    def __init__(self, left: int, buffers: Sequence[DBuffer], *, compiled: bool) -> None:
        self.left = left
        self.compiled = compiled
        self.buffers = tuple(buffers)
        self._models = _models_of(buffers)
        for model in self._models:
            model.forwards.add(self)

    def end(self) -> None:
        """Its backward has run."""
        for model in self._models:
            model.forwards.discard(self)


@dataclass(frozen=True)
class Beside:
    """What a step takes beside a graph, in bytes on this rank.

    Attributes:
        shards: of units that the graph does not read.
        gradients: reduced ones, of those units that graphs after it read: its backward comes after theirs.
        accumulated: gradients that ``no_sync`` accumulates, unsharded.
        kept: results of the forwards before it, and what these keep for their backwards.
        one_of_many: whether Dynamo may run it with other units, too, of layers like it.
        last: whether no graph of the step is known to come after it.
        followed: whether its backward is expected before any other graph.
    """

    shards: int = 0
    gradients: int = 0
    accumulated: int = 0
    kept: int = 0
    one_of_many: bool = False
    last: bool = True
    followed: bool = True

    @property
    def standing(self) -> int:
        """What is there all the time, or when its backward ends: the same on every rank."""
        return self.shards + self.gradients + self.accumulated


def beside(read: Sequence[DBuffer], *, breaks: bool, given: int, checkpointed: bool = False) -> Beside:
    """What there is beside a graph that is about to be compiled.

    Args:
        read: the buffers of the units that it reads.
        breaks: whether a graph break ends it.
        given: bytes of its inputs that may be results of the forwards before it, and are counted with the graph.
        checkpointed: whether it runs again for its backward.
    """
    others = buffers_beside(read).difference(read)
    forwards = _forwards_of(_models_of(read))
    unread = others.difference(*(forward.buffers for forward in forwards))
    # A graph of one layer is called with all that are like it, whichever it was compiled for: in later steps with those
    # before it, too. Which one that is depends on the sizes of this rank's batches.
    layouts = {buffer.layout for buffer in others}
    one_of_many = all(buffer.layout in layouts for buffer in read)
    last = not breaks and not one_of_many
    return Beside(
        shards=sum(buffer.shard.nbytes for buffer in others),
        gradients=sum(buffer.shard.nbytes for buffer in unread if buffer.trains) if torch.is_grad_enabled() else 0,
        accumulated=sum(
            buffer.numel * buffer.reduce_dtype.itemsize
            for buffer in (*read, *others)
            if buffer.trains and buffer.sync.accumulates
        ),
        kept=max(sum(forward.left for forward in forwards) - given, 0),
        one_of_many=one_of_many,
        last=last,
        followed=last or checkpointed,
    )


def trained_bytes(read: Iterable[DBuffer]) -> int:
    """Of the shards with parameters that train, in the models that these buffers are of, on this rank."""
    return sum(buffer.shard.nbytes for buffer in buffers_beside(read) if buffer.trains)


def buffers_beside(read: Iterable[DBuffer]) -> set[DBuffer]:
    """All buffers of the models that these are of."""
    return set(itertools.chain.from_iterable(model.buffers for model in _models_of(read)))


def kept_beside(forward: Forward) -> int:
    """Bytes that other forwards of its models have left and still keep."""
    return sum(each.left for each in _forwards_of(_models_of(forward.buffers)) if each is not forward)


def _models_of(buffers: Iterable[DBuffer]) -> list[Model]:
    return list(dict.fromkeys(buffer.model for buffer in buffers))


def _forwards_of(models: Iterable[Model]) -> set[Forward]:
    return {forward for model in models for forward in model.forwards}
