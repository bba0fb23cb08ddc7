"""What a model takes of a rank's memory beside the graph that is being compiled.

A model may run as several graphs: Dynamo breaks its forward, or its layers are compiled one by one. Each runs beside
the shards of all units, and beside what the forwards before it keep for their backwards. A graph is compiled where it
is first called, so what ran before it is known. Of what comes after it only the units are: if some are laid out like
its own, it is expected to be called for them too, or another like it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from .dbuffer import DBuffer
    from .pool import SlotSpec


class Model:
    """Buffers that were sharded as one model, and its graphs, as long as they live."""

    def __init__(self, buffers: Iterable[DBuffer] = ()) -> None:
        self.buffers = WeakSet(buffers)
        self.forwards: WeakSet[Forward] = WeakSet()
        self.slots: dict[tuple[SlotSpec, ...], None] = {}  # of its graphs, in the order of their compilation

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        """One of no buffers: their copies are added as they are made."""
        return Model()


class Forward:
    """A call of a graph's forward, or a gather in uncompiled code; it lives until its backward has run, or never can.

    Attributes:
        left: bytes of its results and of what it keeps for its backward; in uncompiled code, of the gathered unit.
        buffers: of the units that it read.
        compiled: whether it is a graph's.
    """

    def __init__(self, left: int, buffers: Sequence[DBuffer], *, compiled: bool) -> None:
        self.left = left
        self.compiled = compiled
        self.buffers = tuple(buffers)
        for model in _models_of(buffers):
            model.forwards.add(self)

    def end(self) -> None:
        """Its backward has run."""
        for model in _models_of(self.buffers):
            model.forwards.discard(self)


@dataclass(frozen=True)
class Beside:
    """What a step takes beside a graph, in bytes on this rank.

    Attributes:
        shards: of units that the graph does not read.
        kept: results of the forwards before it, and what these keep for their backwards.
        gradients: reduced, of the units that no forward has read yet; they are there when its backward runs.
        accumulated: gradients of all units, unsharded, which ``no_sync`` accumulates, and the largest scratch of the
            reductions that end it.
        slots: of the graphs before it.
        to_come: how many trained units no forward has read yet.
        repeats: how often the graph, or one like it, is expected to be called for units to come laid out like its own.
    """

    shards: int = 0
    kept: int = 0
    gradients: int = 0
    accumulated: int = 0
    slots: tuple[tuple[SlotSpec, ...], ...] = ()
    to_come: int = 0
    repeats: float = 0.0

    @property
    def nbytes(self) -> int:
        """All of it that is known, apart from slots, which the graph shares."""
        return self.shards + self.kept + self.gradients + self.accumulated

    def later(self, left: int) -> int:
        """What the calls to come of graphs like this one are expected to leave, if it leaves ``left`` bytes itself. Of
        gradients, which are counted already, there are the more the fewer of these backwards are still to run."""
        return max(int(self.repeats * left) - self.gradients, 0)


def beside(read: Sequence[DBuffer], *, trains: bool, accumulates: bool) -> Beside:
    """What there is beside a graph that is about to be compiled.

    Args:
        read: the buffers of the units that it reads.
        trains: whether it has a backward.
        accumulates: whether its gradients are left unsharded.
    """
    models = _models_of(read)
    buffers = {*read, *itertools.chain.from_iterable(model.buffers for model in models)}
    forwards = {forward for model in models for forward in model.forwards}
    others = buffers.difference(read)
    unread = others.difference(*(forward.buffers for forward in forwards)) if trains else set()
    trained = {buffer for buffer in buffers if buffer.trains}
    return Beside(
        shards=_shard_bytes(others),
        kept=sum(forward.left for forward in forwards),
        gradients=_shard_bytes(unread & trained),
        accumulated=_accumulated_bytes(trained) if accumulates else 0,
        slots=tuple(dict.fromkeys(slots for model in models for slots in model.slots)),
        to_come=len(unread & trained),
        repeats=_repeats(read, unread),
    )


def _repeats(read: Sequence[DBuffer], unread: Iterable[DBuffer]) -> float:
    own = Counter(buffer.layout for buffer in read)
    alike = Counter(buffer.layout for buffer in unread if buffer.layout in own)
    return max((count / own[layout] for layout, count in alike.items()), default=0.0)


def take_down_slots(read: Sequence[DBuffer], slots: Iterable[tuple[SlotSpec, ...]]) -> None:
    """Takes down the slots of a graph that was compiled, which reads the units of the buffers ``read``."""
    for model in _models_of(read):
        model.slots.update(dict.fromkeys(slots))


def _models_of(buffers: Iterable[DBuffer]) -> list[Model]:
    return list(dict.fromkeys(buffer.model for buffer in buffers))


def _shard_bytes(buffers: Iterable[DBuffer]) -> int:
    return sum(buffer.shard.nbytes for buffer in buffers)


def _accumulated_bytes(buffers: Iterable[DBuffer]) -> int:
    sizes = [(buffer.numel, buffer.comm().reduce_scratch, buffer.reduce_dtype.itemsize) for buffer in buffers]
    return sum(numel * size for numel, _, size in sizes) + max(
        (scratch * size for _, scratch, size in sizes), default=0
    )
