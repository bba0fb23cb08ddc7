"""What is known of a compiled model before its first step, as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .capture import Capture
from .cost import Cluster
from .passes.context import CompileContext, Part
from .passes.prediction import Prediction, seconds_one_after_another
from .passes.summary import Kind, Summary
from .quantities import in_columns
from .quantities import size_text as _size
from .quantities import time_text as _time
from .runtime.model import Beside
from .runtime.pool import pooled_bytes

_MOVED = (Kind.CAST, Kind.COPY, Kind.CONCATENATION)
_COLLECTIVES = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)


@dataclass(frozen=True)
class UnitReport:
    """A unit's buffer as one graph sees it; bytes on this rank."""

    name: str
    parameters: int  # that the graph reads
    ranks: int  # that hold one copy between them
    replicas: int
    shard_bytes: int
    gathered_bytes: int
    after_forward: str  # what becomes of the gathered parameters


@dataclass(frozen=True)
class GraphReport:
    """One captured graph, compiled.

    Attributes:
        rank: whose it is.
        lowering: what runs it.
        cluster: that its schedules and predictions were made for.
        units: in the order in which the graph first needs them.
        parts: its final graphs: forward and backward, or an inference graph alone.
        slot_bytes: of all slots together, those of each turn; a slot of the forward is one of the backward's too.
        beside: what a step takes beside this graph, where the model has several.
    """

    rank: int
    lowering: str
    cluster: Cluster
    units: tuple[UnitReport, ...]
    parts: dict[Part, Summary]
    slot_bytes: int
    beside: Beside

    @staticmethod
    def of(captured: Capture) -> GraphReport:
        context = captured.context
        units = (
            UnitReport(
                unit.name,
                len(unit.views),
                unit.comm.world_size,
                unit.comm.replica_count,
                unit.shard_bytes,
                unit.numel * unit.comm.param_dtype.itemsize,
                _after_forward(context, ordinal),
            )
            for ordinal, unit in enumerate(context.units)
        )
        return GraphReport(
            context.rank,
            context.lowering.value,
            context.cluster,
            tuple(units),
            dict(context.summaries),
            pooled_bytes(context.slots.values(), context.turns),
            context.beside,
        )

    @property
    def shard_bytes(self) -> int:
        """Of the parameters that the graph reads; their gradients and optimizer states come on top."""
        return sum(unit.shard_bytes for unit in self.units)

    @property
    def peak_bytes(self) -> int:
        """The graph's fullest moment with what a step takes beside it: on this rank, without optimizer states."""
        return self.planned_bytes + self.beside.kept

    @property
    def planned_bytes(self) -> int:
        """``peak_bytes`` but for what forwards before the graph keep, which is what a memory budget is held against."""
        fullest = max(part.peak.nbytes for part in self.parts.values())
        return self.shard_bytes + self.beside.standing + self.slot_bytes + fullest

    @property
    def predicted_seconds(self) -> float:
        """Of forward and backward together, on ``cluster``; the optimizer's step is in no graph."""
        return seconds_one_after_another(part.prediction.phase for part in self.parts.values())

    @property
    def exposed_seconds(self) -> float:
        """Of them, those in which the computation is predicted to stand still and wait for collectives."""
        return sum(part.prediction.exposed for part in self.parts.values())

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True)
class Report:
    """All graphs of a model that one call compiled, in the order in which they were."""

    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "no graph that reads sharded parameters was compiled: call fully_shard on the model first; or Dynamo "
                "has reached its recompile limit for it (torch._dynamo.reset() forgets what it has compiled)"
            )
        parts = [f"graph {i} of {len(self.graphs)}\n{graph}" for i, graph in enumerate(self.graphs, 1)]
        return "\n\n".join(parts)


def _after_forward(context: CompileContext, unit: int) -> str:
    if context.reshards(unit):
        return "resharded"
    if unit not in context.kept:
        return "kept"
    why = "the backward reads it first" if context.memory_budget is None else "memory_budget allows it"
    return f"kept: {why}"


def _lines(graph: GraphReport) -> Iterator[str]:
    yield f"rank {graph.rank}, {graph.lowering} lowering, {len(graph.units)} units"
    yield from in_columns(
        [("unit", "parameters", "ranks", "shard", "gathered", "after forward"), *map(_unit_row, graph.units)]
    )
    for part, summary in graph.parts.items():
        yield ""
        yield from _part_lines(part, summary)
    yield ""
    fullest = max(graph.parts.values(), key=lambda summary: summary.peak.nbytes).peak
    yield f"memory at most {_size(graph.peak_bytes)} a rank, and the optimizer's states"
    yield f"  shards            {_size(graph.shard_bytes):>10}"
    yield f"  slots             {_size(graph.slot_bytes):>10}"
    yield f"  kept parameters   {_size(fullest.parameters):>10}"
    yield f"  gradients         {_size(fullest.gradients):>10}"
    yield f"  activations       {_size(fullest.activations):>10}"
    yield from _beside_lines(graph.beside)
    largest = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in fullest.largest)
    yield f"  fullest at {fullest.node}; apart from slots and shards the largest are {largest or 'none'}"
    yield (
        f"predicted {_time(graph.predicted_seconds)} without the optimizer's step, {_time(graph.exposed_seconds)} "
        f"of it exposed communication, on {graph.cluster}"
    )


def _unit_row(unit: UnitReport) -> tuple[str, ...]:
    ranks = f"{unit.replicas} x {unit.ranks}" if unit.replicas > 1 else str(unit.ranks)
    sizes = _size(unit.shard_bytes), _size(unit.gathered_bytes)
    return unit.name, str(unit.parameters), ranks, *sizes, unit.after_forward


def _beside_lines(beside: Beside) -> Iterator[str]:
    for what, nbytes in (
        ("shards of other units", beside.shards),
        ("gradients of other units", beside.gradients),
        ("gradients that no_sync accumulates", beside.accumulated),
        ("kept by forwards before it", beside.kept),
    ):
        if nbytes:
            yield f"  beside this graph {_size(nbytes):>10}   ({what})"


def _part_lines(part: Part, summary: Summary) -> Iterator[str]:
    counts = Counter(entry.kind for entry in summary.entries)
    collectives = " and ".join(
        f"{counts[kind]} {kind.value}s of {_size(summary.nbytes(kind))}" for kind in _COLLECTIVES if counts[kind]
    )
    yield f"{part.value}: {summary.nodes} nodes, {collectives or 'no collectives'}"
    predicted = summary.prediction
    yield (
        f"  predicted {_time(predicted.seconds)}: computation {_time(predicted.compute)}, communication "
        f"{_time(predicted.communication)} ({_time(predicted.exposed)} exposed, {_time(predicted.slowdown)} "
        f"taken from the computation){_starved(predicted)}; no schedule takes less than {_time(predicted.least)}"
    )
    for event in summary.schedule:
        yield f"  {event}"
    for number, slot in enumerate(summary.slots):
        own = ", carried from forward to backward" if slot.carried else ""
        place = f"at {_size(slot.offset)}"
        yield f"  slot {number} {place}, {_size(slot.nbytes)} {slot.dtype.removeprefix('torch.')}{own}"
        for tenant in slot.tenants:
            yield f"    nodes {tenant.first:>5} to {tenant.last:>5}  {tenant.what}"
    if counts[Kind.COPY_IN]:
        nbytes = summary.nbytes(Kind.COPY_IN)
        yield f"  {counts[Kind.COPY_IN]} copy-ins of {_size(nbytes)}: shards, into their places in the gathered buffers"
    moved = [entry for entry in summary.entries if entry.kind in _MOVED]
    if not moved:
        yield f"  nothing {'else ' if counts[Kind.COPY_IN] else ''}is copied or cast"
    for entry in moved:
        yield f"  {entry.kind.value} of {_size(entry.nbytes)}, {entry.direction.value} of {entry.unit}: {entry.why}"


def _starved(predicted: Prediction) -> str:
    return f", {_time(predicted.starved)} until the host has launched what is next" if predicted.starved else ""
