"""What is known of a final graph before it runs: its schedule, what it moves, and the memory it needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .prediction import Prediction


class Kind(enum.Enum):
    """What bytes are moved by, or lie in."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    COPY_IN = "copy-in"  # of a shard, before its gather, where ranks send from the gathered buffer
    CAST = "cast"
    COPY = "copy"
    CONCATENATION = "concatenation"
    BUFFER = "buffer"


class Direction(enum.Enum):
    """Which way the data goes."""

    GATHER = "parameters"  # from shards to where they are read
    REDUCE = "gradients"  # from where they are written to shards


@dataclass(frozen=True)
class Entry:
    """Bytes of one kind.

    Attributes:
        unit: name of the unit.
        nbytes: moved, or allocated for a buffer.
        why: what it is, and for a copy why it is there.
    """

    kind: Kind
    direction: Direction
    unit: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Tenant:
    """A communication buffer, which fills its slot, from the ``first`` to the ``last`` node of the graph that touches
    it."""

    what: str
    first: int
    last: int


@dataclass(frozen=True)
class SlotUse:
    """A slot in one graph, and the buffers that share it, in their order.

    Attributes:
        offset: bytes from the beginning of its memory.
        carried: whether it is only for what is carried from the forward to the backward.
    """

    dtype: str
    nbytes: int
    offset: int
    tenants: tuple[Tenant, ...]
    carried: bool = False


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a graph, in bytes, apart from slots, shards and optimizer states.

    Attributes:
        node: at which it occurs.
        parameters: unsharded parameters kept outside slots.
        gradients: reduced gradients of this rank, and gradients kept outside slots.
        activations: everything else that the graph holds, what it has got from the forward included.
        largest: the largest of it, by what buffers hold or the nodes that made it, and their bytes.
    """

    node: str
    parameters: int = 0
    gradients: int = 0
    activations: int = 0
    largest: tuple[tuple[str, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.parameters + self.gradients + self.activations


@dataclass(frozen=True)
class Summary:
    """A final graph.

    Attributes:
        nodes: how many it has.
        schedule: launches and waits of its collectives, in order.
        entries: what it moves for communication, and the buffers it allocates for that.
        slots: static memory that it takes, shared with other graphs.
        peak: its fullest moment.
        left_bytes: that it leaves in memory, apart from its inputs.
        prediction: its time, and what of its communication is exposed.
    """

    nodes: int
    schedule: tuple[str, ...]
    entries: tuple[Entry, ...]
    slots: tuple[SlotUse, ...]
    peak: Peak
    left_bytes: int
    prediction: Prediction

    def nbytes(self, *kinds: Kind) -> int:
        """Bytes of all entries of these kinds."""
        return sum(entry.nbytes for entry in self.entries if entry.kind in kinds)
