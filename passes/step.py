"""Both halves of a step, looked at before either is lowered: what each needs, and what gathering twice is worth.

Memory is that of the final graphs. Buffers that live within a graph lie in slots, which are there all the time; the
parameters of a unit that is kept are an allocation of their own, from its gather in the forward to its last use in
the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from ..runtime.pool import SlotSpec, pooled_bytes
from ..schedule import TaskGraph, Transfer, least_peak
from ..schedule.retention import keepable
from ..torch_internals.aot import Halves
from ..torch_internals.tracing import graph_module
from .assign import Lifetime, lifetimes, slots_for
from .context import CompileContext, Need, Part, Use, marked_buffer
from .expand import expand
from .memory import GraphMemory
from .overlap import room_ahead
from .sink import sink
from .tasks import Collective, collectives_of, segments_of, task_graph

_UNLIMITED = 1 << 62
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Half:
    """The forward or the backward of a step, before its collectives are moved.

    Attributes:
        part: which it is.
        live: bytes outside slots, node by node.
        buffers: what will lie in slots, unless it is kept.
        collectives: in the order of ``tasks.transfers``.
        tasks: the task graph, its computation with no memory but dequantized parameters. None for a graph with no
            computation.
        groups: each unit's process group.
    """

    part: Part
    live: tuple[int, ...]
    buffers: tuple[Lifetime, ...]
    collectives: tuple[Collective, ...]
    tasks: TaskGraph | None
    groups: tuple[str, ...]

    @property
    def gathered(self) -> dict[int, int]:
        """By unit, its gather among the collectives."""
        return {each.unit: index for index, each in enumerate(self.collectives) if each.gathers}

    def peak(self, kept: frozenset[int]) -> int:
        """The fullest moment outside slots, in bytes, with the parameters of ``kept`` units held over the boundary."""
        changes = [0] * (len(self.live) + 1)
        for lifetime in self._parameters(kept):
            first, last = (lifetime.first, len(self.live)) if self.part is Part.FORWARD else (0, lifetime.last + 1)
            changes[first] += lifetime.nbytes
            changes[last] -= lifetime.nbytes
        fullest = held = 0
        for live, change in zip(self.live, changes[:-1], strict=True):
            held += change
            fullest = max(fullest, live + held)
        return fullest

    def slots(self, kept: frozenset[int], carried: frozenset[int] = _NONE) -> tuple[SlotSpec, ...]:
        """The slots of everything else, if nothing overlaps; without those of units that are ``carried`` over to it."""
        outside = {*self._parameters(kept), *self._received(carried)}
        return slots_for([lifetime for lifetime in self.buffers if lifetime not in outside])

    def slots_to_carry(self, carried: frozenset[int]) -> tuple[SlotSpec, ...]:
        """The slots into which units that this half gathers are carried over to it."""
        found = ((each.node.meta["val"], marked_buffer(each.node).unit) for each in self._received(carried))
        return tuple(SlotSpec(v.numel(), v.dtype, v.device, self.groups[unit]) for v, unit in found)

    def tasks_with(self, kept: frozenset[int], live: int) -> TaskGraph | None:
        """The task graph with the units ``kept`` and ``live`` bytes always taken; None if it has no transfers."""
        if self.tasks is None:
            return None
        transfers: list[Transfer] = []
        for each, transfer in zip(self.collectives, self.tasks.transfers, strict=True):
            if not (each.gathers and each.unit in kept):
                transfers.append(transfer)
            elif self.part is Part.FORWARD:
                transfers.append(replace(transfer, output_bytes=0))  # counted with what is live
        compute = tuple(replace(task, live_bytes=live + task.live_bytes) for task in self.tasks.compute)
        return replace(self.tasks, compute=compute, transfers=tuple(transfers)) if transfers else None

    def _received(self, units: frozenset[int]) -> list[Lifetime]:
        """What the gathers of ``units`` fill: their parameters, or codes and scales of them."""
        filled = {self.collectives[self.gathered[unit]].buffers[0] for unit in units}
        return [lifetime for lifetime in self.buffers if lifetime.node in filled]

    def _parameters(self, kept: frozenset[int]) -> list[Lifetime]:
        marked = ((lifetime, marked_buffer(lifetime.node)) for lifetime in self.buffers)
        return [lifetime for lifetime, mark in marked if mark.use is Use.PARAMETERS and mark.unit in kept]


@dataclass(frozen=True)
class Step:
    """A forward and its backward.

    Attributes:
        standing: bytes that the step takes all the time, apart from slots.
    """

    standing: int
    forward: Half
    backward: Half

    @property
    def halves(self) -> tuple[Half, Half]:
        return self.forward, self.backward

    def peak(self, kept: frozenset[int]) -> int:
        """The fullest moment outside slots and shards, in bytes."""
        return max(half.peak(kept) for half in self.halves)

    def slots(self, kept: frozenset[int] = _NONE, carried: frozenset[int] = _NONE) -> dict[Part, tuple[SlotSpec, ...]]:
        """The slots of both halves if nothing overlaps, with gathers for the backward ``carried`` over to it."""
        carrying = self.backward.slots_to_carry(carried)
        return {
            Part.FORWARD: self.forward.slots(kept) + carrying,
            Part.BACKWARD: self.backward.slots(kept, carried) + carrying,
        }

    def planned(self, kept: frozenset[int] = _NONE, carried: frozenset[int] = _NONE) -> int:
        """Bytes that the step takes with the units ``kept`` and ``carried``, if nothing overlaps."""
        return self.standing + pooled_bytes(self.slots(kept, carried).values()) + self.peak(kept)

    def tasks(self, kept: frozenset[int] = _NONE) -> dict[Part, TaskGraph]:
        """The task graphs of the halves that have any transfers."""
        live = self.standing + self.peak(kept)
        found = {half.part: half.tasks_with(kept, live) for half in self.halves}
        return {part: tasks for part, tasks in found.items() if tasks is not None}

    def allowances(self, kept: frozenset[int] = _NONE) -> dict[Part, int]:
        """By half, the bytes with which it can gather and reduce one unit ahead."""
        return {part: least_peak(tasks) + room_ahead(tasks) for part, tasks in self.tasks(kept).items()}

    def needs(self, kept: frozenset[int], carried: frozenset[int]) -> dict[Part, Need]:
        """What each half takes at least."""
        slots, allowances = self.slots(kept, carried), self.allowances(kept)
        return {
            half.part: Need(slots[half.part], half.peak(kept), allowances.get(half.part, 0)) for half in self.halves
        }

    def first_gathered_again(self, kept: frozenset[int] = _NONE) -> int | None:
        """The unit that the backward gathers first, if the forward has gathered it too."""
        first = next((each.unit for each in self.backward.collectives if each.gathers and each.unit not in kept), None)
        return first if first in self.forward.gathered else None

    @cached_property
    def gathered_again(self) -> tuple[int, ...]:
        """Units whose gather the backward repeats, the one that is worth keeping most first. One that the program
        itself returns is there in any case."""
        first, second = self.forward.tasks, self.backward.tasks
        if first is None or second is None:
            return ()
        gathered = {unit: at for unit, at in self.forward.gathered.items() if not self.forward.collectives[at].escapes}
        units = [each.unit for each in self.backward.collectives]
        transfers = [
            replace(
                transfer,
                name=f"{transfer.name}, in backward",
                writers=_after(first, transfer.writers),
                readers=_after(first, transfer.readers),
                repeats=gathered.get(unit) if transfer.readers else None,
            )
            for unit, transfer in zip(units, second.transfers, strict=True)
        ]
        whole = TaskGraph(first.compute + second.compute, (*first.transfers, *transfers))
        order = keepable(whole, [0] * len(whole.compute), _UNLIMITED)
        return tuple(units[index - len(first.transfers)] for index in order)


def _after(first: TaskGraph, positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(position + len(first.compute) for position in positions)


def survey(halves: Halves, context: CompileContext) -> Step:
    """Runs the first passes of the final graphs on copies of both halves, and takes down what the step needs."""
    forward, backward = (
        _survey(half, context, part) for half, part in zip(halves, (Part.FORWARD, Part.BACKWARD), strict=True)
    )
    return Step(context.standing_bytes, forward, backward)


def _survey(gm: fx.GraphModule, context: CompileContext, part: Part) -> Half:
    gm = copied(gm)
    expand(gm, context)
    sink(gm, context)
    collectives = collectives_of(gm.graph)
    segments = segments_of(gm.graph, context, collectives)
    memory = GraphMemory(gm.graph, context, part)
    buffers = lifetimes(gm.graph, memory.bases)
    return Half(
        part,
        tuple(memory.live_bytes({lifetime.node for lifetime in buffers})),
        tuple(buffers),
        tuple(collectives),
        task_graph(gm.graph, context, collectives, segments, 0, part) if segments else None,
        tuple(unit.comm.group for unit in context.units),
    )


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph of operators, which can be edited; modules and values are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(gm.graph, copies)
    output = graph.output(results)
    output.meta = dict(gm.graph.output_node().meta)
    copy = graph_module(gm, graph)
    copy.meta.update(gm.meta)
    return copy
