"""Proves, on each final graph, what must hold before it runs. Raises GraphError at the first breach.

1. A gathered buffer is read only after its wait, and nothing is written to it; nothing is written to a gradient
   buffer once its reduce-scatter is launched.
2. Memory of a slot is given to another buffer only when no collective is in flight on it, and nothing reads the buffer
   that was there any more, nor a view of it: what shares memory with a buffer is known to. No result lies in a slot.
3. A collective has one launch and one wait. A unit is gathered at most once in each graph, and its gradient is
   reduced in the backward exactly as often as the joint graph reduced it: once. In a forward, a unit that is
   resharded is released: no output keeps its gathered buffer alive.
   A gather that the forward carries over to the backward is launched in the one and taken in the other, into a slot
   that nothing else uses. A reduction may be left in flight when the backward ends: nothing in the graph touches its
   memory again, and its result is only returned, or cast when it is read. A collective is of its unit's ranks.
4. The order, sizes and dtypes of the collectives are recorded, for the comparison across ranks.
5. Nothing stands between a shard and its gather, nor between a reduction and the gradient it returns, but a cast to
   the shard's dtype; and what is reduced is the buffer that gradients were written to, each parameter's place in it,
   once. A unit's collectives use its own shard and buffers, and its gradient is returned in its place.
   Gathered parameters are moved by the program alone; a gradient that is copied into its place is counted as copied,
   with the reason.
6. What lies in a slot fits there, and shards, slots and the fullest moment of each graph are within the memory budget.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from ..cost.collectives import ALL_GATHER, REDUCE_SCATTER
from ..runtime import leaving, ops, quantized_ops
from ..schemas import written_by
from .aliases import base_of, touched_by
from .context import (
    Buffer,
    Comm,
    CompileContext,
    Part,
    Role,
    Use,
    buffer_of,
    comm_of,
    fail,
    is_allocation,
    marked_buffer,
    shared_text,
)
from .moves import CASTS, uncast
from .slot_memory import sharing_memory
from .verify_bytes import check_copies, check_memory, check_written
from .verify_ends import check_ends
from .verify_views import check_views


def verify(gm: fx.GraphModule, context: CompileContext) -> None:
    part = context.part
    assert part is not None
    execution = _Execution(context)
    launches = execution.check(gm.graph)
    _check_counts(launches, part, context)
    check_ends(gm.graph, execution.bases, context)
    check_views(gm.graph, execution.bases, context)
    check_copies(gm.graph, execution.bases, context)
    check_written(gm.graph, execution.bases, context)
    check_memory(gm.graph, context)
    context.collectives[part] = [_line(node, comm, context) for node, comm in launches]


class _State(enum.Enum):
    UNDEFINED = "undefined"
    READY = "ready"
    IN_FLIGHT = "in flight"
    LEFT = "left in flight"
    SPENT = "spent"


_FLYING = (_State.IN_FLIGHT, _State.LEFT)


class _Execution:
    """Runs through a graph and follows what each piece of communication memory holds."""

    def __init__(self, context: CompileContext) -> None:
        self.context = context
        self.bases: dict[fx.Node, fx.Node] = {}
        self.held: dict[fx.Node, tuple[fx.Node, _State]] = {}  # memory → the buffer in it, or in a part of it
        self.sharing: dict[fx.Node, tuple[fx.Node, ...]] = {}  # slot → all that have memory in common with it
        self.begun: set[fx.Node] = set()  # buffers that something was written to
        self.shared: fx.Node | None = None  # a launch that waits for the next

    def check(self, graph: fx.Graph) -> list[tuple[fx.Node, Comm]]:
        """Returns the launches of collectives, in order."""
        launches = []
        self.sharing = sharing_memory(graph)
        for node in graph.nodes:
            self.bases[node] = base_of(node, self.bases)
            comm = comm_of(node)
            if comm is not None:
                self._check_shared(node)
            if node.op == "output":
                self._check_kept(node)
                self._check_returned(node)
            if node.target is leaving.cast_when_read:
                self._cast_when_read(node)
            elif comm is None:
                self._compute(node)
            elif comm.role in (Role.WAIT, Role.LEAVE):
                self._wait(node, comm)
            else:
                self._launch(node, comm)
                launches.append((node, comm))
            if comm is not None and comm.role is Role.TAKE:
                self._wait(node, comm)
        for buffer, state in self._holders(self.held):
            if state is _State.IN_FLIGHT and not marked_buffer(buffer).carried:
                fail(self.context, buffer, f"the collective on the {self._name(buffer)} has no wait")
        return launches

    def _check_shared(self, node: fx.Node) -> None:
        """What shares a collective is of one kind, group and dtype, and no other launch or wait is in between."""
        first, self.shared = self.shared, node if node.kwargs.get("with_next") else None
        if first is not None and _collective_of(first) != _collective_of(node):
            fail(self.context, first, "shares a collective with the next launch, which is of another kind, or missing")

    def _launch(self, node: fx.Node, comm: Comm) -> None:
        source, *others = (self.bases[arg] for arg in node.all_input_nodes)
        targets = [other for other in others if buffer_of(other) is not None]
        self._check_own(node, comm, source, targets)
        if bool(marked_buffer(targets[0]).carried) is not (comm.role in (Role.CARRY, Role.TAKE)):
            fail(self.context, node, f"the {self._name(targets[0])} are carried over to the backward by one graph only")
        if comm.kind == REDUCE_SCATTER:
            if buffer_of(source) is None:
                fail(self.context, node, "what is reduced is not the buffer that gradients are written to")
            self._check_holds(source, node)
            if node.target is quantized_ops.start_reduce_scatter_quantized:
                self._hold(source, _State.SPENT)  # what is sent are its codes
            else:
                targets.append(source)
        for target in targets:
            for holder, state in self._holders(self._sharing(target)):
                if marked_buffer(holder).carried or marked_buffer(target).carried:
                    carried = "what is carried to the backward"
                    fail(self.context, node, f"the {self._name(target)} share a slot with {carried}")
                if state in _FLYING:
                    fail(self.context, node, f"the {self._name(target)} get memory on which a collective is in flight")
            self._hold(target, _State.IN_FLIGHT)

    def _check_own(self, node: fx.Node, comm: Comm, source: fx.Node, targets: list[fx.Node]) -> None:
        """A unit's collective takes its shard or its gradients, and gives to its own buffers."""
        name = self.context.units[comm.unit].name
        for buffer in (source, *targets):
            mark = buffer_of(buffer)
            if mark is not None and mark.unit != comm.unit:
                fail(self.context, node, f"the {self._name(buffer)} are in a collective of unit {name}")
        shard = self.context.sources.get(comm.unit)
        if comm.kind == ALL_GATHER and shard != source.name:
            fail(self.context, node, f"unit {name} is gathered from {source.name}, and its shard is {shard}")

    def _wait(self, node: fx.Node, comm: Comm) -> None:
        if comm.role is Role.LEAVE and self.context.part is not Part.BACKWARD:
            fail(self.context, node, "only a backward leaves reductions in flight")
        buffers = [self.bases[arg] for arg in node.all_input_nodes]
        for buffer in buffers[1:] if comm.role is Role.TAKE else buffers:
            if self._state(buffer) != (buffer, _State.IN_FLIGHT):
                fail(
                    self.context, node, f"a wait for no launch: no collective is in flight on the {self._name(buffer)}"
                )
            spent = marked_buffer(buffer).use in (Use.GRADIENTS, Use.SCRATCH)
            after = _State.SPENT if spent else _State.READY
            self._hold(buffer, _State.LEFT if comm.role is Role.LEAVE else after)

    def _cast_when_read(self, node: fx.Node) -> None:
        reduced, result = (self.bases[arg] for arg in node.all_input_nodes)
        if self._state(reduced) != (reduced, _State.LEFT):
            fail(
                self.context, node, f"a cast for when the {self._name(reduced)} are read, which were not left in flight"
            )
        self._hold(result, _State.LEFT)

    def _compute(self, node: fx.Node) -> None:
        written = [self.bases[arg] for arg in written_by(node)]
        for buffer in touched_by(node, self.bases):
            mark = buffer_of(buffer)
            if mark is None or (node.op == "output" and self._is_left(buffer, mark)):
                continue
            if buffer in written:
                self._check_writable(buffer, mark, node)
                self._hold(buffer, _State.READY)
            self._check_holds(buffer, node)
            if mark.use is Use.PACKED and node.target is not quantized_ops.dequantize:
                fail(self.context, node, f"the {self._name(buffer)} are read by what does not dequantize them")
            if mark.use is Use.REDUCED and node.op != "output" and node.target not in CASTS:
                fail(
                    self.context, node, f"the {self._name(buffer)} are moved or computed with before they are returned"
                )

    def _check_writable(self, buffer: fx.Node, mark: Buffer, node: fx.Node) -> None:
        holder, state = self._state(buffer)
        dequantizes = node.target is quantized_ops.dequantize and mark.use is Use.PARAMETERS
        if mark.use is not Use.GRADIENTS and not dequantizes:
            fail(self.context, node, f"writes to the {self._name(buffer)}")
        source = marked_buffer(self.bases[node.all_input_nodes[0]]) if dequantizes else mark
        if dequantizes and (source.use, source.unit) != (Use.PACKED, mark.unit):
            fail(self.context, node, f"the {self._name(buffer)} are dequantized from another buffer than theirs")
        if dequantizes and holder is buffer and state is _State.READY:
            fail(self.context, node, f"the {self._name(buffer)} are dequantized a second time")
        if holder is buffer and state is _State.SPENT:
            fail(self.context, node, f"writes to the {self._name(buffer)}, whose reduction was launched before")
        for other, flying in self._holders(self._sharing(buffer)):
            if flying in _FLYING:
                fail(self.context, node, f"writes to memory on which a collective is in flight: {self._name(other)}")
        if holder is not buffer and buffer in self.begun:
            fail(
                self.context, node, f"writes more of the {self._name(buffer)}, which the {self._name(holder)} overwrote"
            )
        self.begun.add(buffer)

    def _check_holds(self, buffer: fx.Node, node: fx.Node) -> None:
        holder, state = self._state(buffer)
        if holder is not buffer:
            fail(self.context, node, f"reads the {self._name(buffer)}, whose memory holds the {self._name(holder)}")
        if state in _FLYING:
            fail(self.context, node, f"the {self._name(buffer)} are read before the wait of their collective")
        if state is not _State.READY:
            why = "after they were reduced" if state is _State.SPENT else "before anything was written there"
            fail(self.context, node, f"the {self._name(buffer)} are read {why}")

    def _is_left(self, buffer: fx.Node, mark: Buffer) -> bool:
        """Whether a buffer is reduced gradients that their reader will wait for."""
        return mark.use is Use.REDUCED and self._state(buffer) == (buffer, _State.LEFT)

    def _check_kept(self, output: fx.Node) -> None:
        """Nothing kept for the backward is memory that a resharded unit was gathered into."""
        outputs: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        if self.context.part is not Part.FORWARD:
            return
        for kept in outputs[self.context.results :]:
            mark = buffer_of(self.bases[kept]) if isinstance(kept, fx.Node) else None
            if mark is not None and mark.use is Use.PARAMETERS and self.context.reshards(mark.unit):
                name = self.context.units[mark.unit].name
                fail(self.context, output, f"unit {name} is resharded after forward, but its parameters are kept")

    def _check_returned(self, output: fx.Node) -> None:
        """Each unit's reduced gradient is returned where the program has that of its shard."""
        outputs: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        for place, unit in self.context.returned.items():
            result = outputs[place]
            mark = buffer_of(self.bases[uncast(result)]) if isinstance(result, fx.Node) else None
            if mark is None or (mark.use, mark.unit) != (Use.REDUCED, unit):
                name = self.context.units[unit].name
                fail(self.context, output, f"result {place} is not the reduced gradient of unit {name}")

    def _memory(self, buffer: fx.Node) -> fx.Node:
        """A slot, or memory of the buffer's own."""
        return buffer if is_allocation(buffer) else buffer.all_input_nodes[0]

    def _sharing(self, buffer: fx.Node) -> Sequence[fx.Node]:
        """Its memory, and slots that have some of that memory in common with it."""
        memory = self._memory(buffer)
        return self.sharing.get(memory, (memory,))

    def _hold(self, buffer: fx.Node, state: _State) -> None:
        """Has the buffer lie in its memory, and nothing else in any of that memory."""
        self.held.update(dict.fromkeys(self._sharing(buffer), (buffer, state)))

    def _holders(self, memories: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, _State]]:
        """The buffers that lie in some of the memories as a whole, and are of them."""
        for memory in memories:
            buffer, state = self.held.get(memory, (None, _State.UNDEFINED))
            if buffer is not None and self._memory(buffer) is memory:
                yield buffer, state

    def _state(self, buffer: fx.Node) -> tuple[fx.Node, _State]:
        """What lies in the buffer's memory; the buffer itself, undefined, if nothing ever did."""
        return self.held.get(self._memory(buffer), (buffer, _State.UNDEFINED))

    def _name(self, buffer: fx.Node) -> str:
        mark = marked_buffer(buffer)
        return f"{mark.use.value} of unit {self.context.units[mark.unit].name}"


def _check_counts(launches: list[tuple[fx.Node, Comm]], part: Part, context: CompileContext) -> None:
    counts = Counter((comm.kind, comm.unit) for _, comm in launches if comm.role is not Role.CARRY)
    crossing = sorted(f"{comm.role.value} {comm.unit}" for _, comm in launches if comm.role is not Role.LAUNCH)
    over = Role.CARRY if part is Part.FORWARD else Role.TAKE
    carried = sorted(f"{over.value} {unit}" for unit in context.carried)
    if crossing != carried:
        fail(context, None, f"{part.value}: the gathers that cross are {crossing}, not {carried}")
    for ordinal, unit in enumerate(context.units):
        gathers = counts[ALL_GATHER, ordinal]
        if gathers > 1:
            fail(context, None, f"{part.value}: unit {unit.name} is gathered {gathers} times; at most once")
        reductions = counts[REDUCE_SCATTER, ordinal]
        wanted = context.reduced_units.count(ordinal) if part is Part.BACKWARD else 0
        if reductions != wanted or wanted > 1:
            fail(
                context,
                None,
                f"{part.value}: the gradient of unit {unit.name} is reduced {reductions} times, "
                f"{'once' if wanted else 'never'} is right",
            )


def _collective_of(node: fx.Node) -> tuple[object, ...]:
    """What must be equal for launches to share a collective: the operator, the group, and the dtype that is sent."""
    if node.target is ops.start_all_gather:
        return node.target, node.args[3], node.all_input_nodes[1].meta["val"].dtype
    if node.target is ops.start_reduce_scatter:
        return node.target, node.args[4:6], node.all_input_nodes[0].meta["val"].dtype
    return (node,)


def _line(node: fx.Node, comm: Comm, context: CompileContext) -> str:
    source = node.all_input_nodes[0].meta["val"]
    line = f"{comm.kind} of unit {comm.unit}: {source.numel()} elements of {source.dtype}{shared_text(node)}"
    return line + _gradients(comm.unit, context) if comm.kind == REDUCE_SCATTER else line


def _gradients(unit: int, context: CompileContext) -> str:
    """Which gradients of a unit there are, whether they accumulate, and what is frozen: ranks where it is otherwise
    must know of it."""
    absent = context.without_gradient(unit)
    missing = f", without gradients of parameters at {absent}" if absent else ""
    frozen = sorted(view.offset for view in context.units[unit].views if not view.trainable)
    missing += f", of which those at {frozen} are frozen" if frozen else ""
    accumulating = ", accumulating" if context.units[unit].accumulates else ""
    return f", laid out as {context.units[unit].places}{missing}{accumulating}"
