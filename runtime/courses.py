"""Layers that are compiled one by one: each graph's first gather is launched while the graph before it runs.

A *course* is what such graphs do in one forward of a model, or in one backward. The next course like it will gather the
same things in the same order. So when a graph has launched its last gather, and the course has gone as the one before
it did, the next graph's first gather is launched: into the slot where that graph has it, or, if it is kept for the
backward, into memory which that graph then takes. Graphs of a course take turns at two memories of slots (``pool.py``),
and what a backward's graph leaves in flight may stay so while the next runs.

A gather is a collective, so whether it is launched ahead, and whether that will do for the graph that comes to it, must
be the same on every rank. Both follow from the order of gathers alone, and not from a rank's memory, nor from how often
it has compiled a layer, nor from when it lets go of a layer that a model has no more. Where a shard was written to
since its gather was launched ahead, as a forward may do with parameters of layers that it comes to later (an encoder
whose weights follow another's), it is gathered again (``writes.py``). From course to course, between which optimizers
write, nothing is launched ahead.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_internals.autograd import in_backward, profiled_to_the_end
from ..torch_internals.tracing import is_shape
from .arrivals import next_number, settle, wait_for_uses
from .backwards import running_backward
from .collectives import Nothing, Pending
from .life import Life, life
from .writes import Watch

if TYPE_CHECKING:
    from .dbuffer import DBuffer
    from .pool import GraphSlots

TURNS = 2

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Shards, each with what it is gathered into."""

Start = Callable[[Pairs, str], Pending]
"""Launches a gather of pairs by the group of that name."""


@dataclass(frozen=True)
class _Stop:
    """A gather of a course.

    Attributes:
        sources: the memory of its shards. No other memory is equal to one that is referred to.
        results: elements and dtype of each that is gathered.
        call: which of the course's calls of graphs it is in.
        places: where the graph has each, a slot by number, or None for memory that it takes (see ``memory_of_gather``);
            None where another gather of the graph comes before this one.
        graph: whose slots they are.
        buffers: of the units; fewer than shards where a shard is not a unit's own memory.
        group: name of the process group.
        start: launches it.
    """

    sources: tuple[StorageWeakRef, ...]
    results: tuple[tuple[int, torch.dtype], ...]
    call: int = field(compare=False)
    places: Sequence[int | None] | None = field(compare=False)
    graph: ref[GraphSlots] = field(compare=False)
    buffers: tuple[ref[DBuffer], ...] = field(compare=False)
    group: str = field(compare=False)
    start: Start = field(compare=False)


@dataclass
class _Ahead:
    """A gather that was launched for the next graph."""

    stop: _Stop
    watch: Watch
    fulls: list[Tensor]
    pending: Pending

    def is_stale(self) -> bool:
        """Whether a shard was written to since: asked once, when it is wanted."""
        try:
            return self.watch.is_stale()
        except RuntimeError:
            self.end()
            raise

    def end(self) -> None:
        """Waits for what nobody takes."""
        self.pending.wait()

    def by_source(self) -> dict[StorageWeakRef, Tensor]:
        return dict(zip(self.stop.sources, self.fulls, strict=True))

    def move_out(self) -> None:
        """Of slots, which a graph may write to before it gathers, to memory that nothing else uses."""
        assert self.stop.places is not None
        if set(self.stop.places) != {None}:
            self.pending.wait()
            self.pending, self.fulls = Nothing(), [full.clone() for full in self.fulls]

    def into(self, fulls: Sequence[Tensor]) -> Pending:
        """Has it be, or come, where a graph wants it."""
        if all(own.data_ptr() == full.data_ptr() for own, full in zip(self.fulls, fulls, strict=True)):
            return self.pending
        self.pending.wait()
        torch._foreach_copy_(list(fulls), self.fulls)
        return Nothing()


class Course:
    """One forward, or one backward. ``kind`` is equal for those that may go alike."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._calls = 0
        self._graph: ref[GraphSlots] | None = None
        self._begun = math.inf  # the number of reductions that were left before the last graph began
        self._known: Sequence[_Stop] = ()  # of the last course like this, as long as this one goes as it did
        self._route: list[_Stop] = []
        self._ahead: _Ahead | None = None

    def enter(self, graph: GraphSlots) -> int:
        """Begins a call of a graph, and returns whose turn it is: what the graph before the last left is waited for."""
        turn, self._calls = self._calls % TURNS, self._calls + 1
        self._graph = ref(graph)
        if self._ahead is not None and self._ahead.stop.graph() is not graph:
            self._ahead.move_out()
        before, self._begun = self._begun, next_number()
        settle(before)
        return turn

    def memory_of_gather(self, shard: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for what is gathered first: that into which it is being gathered."""
        ahead = self._ahead.by_source() if self._ahead is not None else {}
        full = ahead.get(StorageWeakRef(shard.untyped_storage()))
        if full is None or (full.numel(), full.dtype) != (numel, dtype):
            return shard.new_empty(numel, dtype=dtype)
        return full

    def gather(self, pairs: Pairs, group: str, start: Start) -> Pending:
        """Launches a gather of the graph that runs, if it was not launched ahead, and maybe the next graph's first."""
        stop = self._stop(pairs, group, start)
        pending = self._arriving(stop, pairs) or start(pairs, group)
        if (following := self._next_after(stop)) is not None:
            self._ahead = _launched_ahead(following, self._calls % TURNS)
        return pending

    def end(self) -> None:
        """Waits for what was launched ahead of a graph that did not come. Should the course go on, its next graph waits
        for all that others have left."""
        ahead, self._ahead, self._known, self._begun = self._ahead, None, (), math.inf
        if ahead is not None:
            ahead.end()

    def _stop(self, pairs: Pairs, group: str, start: Start) -> _Stop:
        assert self._graph is not None
        graph = self._graph()
        assert graph is not None
        fulls = [full for _, full in pairs]
        first = not self._route or self._route[-1].call != self._calls
        return _Stop(
            sources=tuple(StorageWeakRef(shard.untyped_storage()) for shard, _ in pairs),
            results=tuple((full.numel(), full.dtype) for full in fulls),
            call=self._calls,
            places=graph.numbers_of(fulls, (self._calls - 1) % TURNS) if first else None,
            graph=self._graph,
            buffers=tuple(ref(buffer) for shard, _ in pairs if (buffer := _buffer_of(shard)) is not None),
            group=group,
            start=start,
        )

    def _arriving(self, stop: _Stop, pairs: Pairs) -> Pending | None:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead.stop == stop and not ahead.is_stale():
            return ahead.into([full for _, full in pairs])
        ahead.end()
        return None

    def _next_after(self, stop: _Stop) -> _Stop | None:
        """The gather that is to be launched ahead: the first of another graph, which can be."""
        here = len(self._route)
        if not here:
            self._known = _last_route(self._kind, stop, self._route)
        self._route.append(stop)
        if here >= len(self._known) or self._known[here] != stop:
            self._known = ()
        if here + 1 >= len(self._known):
            return None
        following = self._known[here + 1]
        other = following.call != self._known[here].call
        found = following.places is not None and len(following.buffers) == len(following.sources)
        return following if other and found else None


def _launched_ahead(stop: _Stop, turn: int) -> _Ahead | None:
    buffers = [each() for each in stop.buffers]
    shards = [buffer.shard for buffer in buffers if buffer is not None and buffer.forward >= buffer.model.forward]
    if len(shards) < len(buffers):
        return None  # the model has them no more
    device = shards[0].device
    fulls = list(_destinations(stop, turn, device))
    wait_for_uses(fulls)
    watch = Watch(shards)
    pending = stop.start(list(zip(shards, fulls, strict=True)), stop.group)
    if profiled_to_the_end(device):
        pending.wait()
        pending = Nothing()
    return _Ahead(stop, watch, fulls, pending)


def _destinations(stop: _Stop, turn: int, device: torch.device) -> Iterator[Tensor]:
    graph = stop.graph()  # None if this rank has compiled it anew
    assert stop.places is not None
    for place, (numel, dtype) in zip(stop.places, stop.results, strict=True):
        if place is None or graph is None:
            yield torch.empty(numel, dtype=dtype, device=device)
        else:
            yield from graph.numbered([place], turn)


_routes: WeakKeyDictionary[Life, dict[tuple[str, _Stop], Sequence[_Stop]]] = WeakKeyDictionary()
"""Of the last courses, by their kinds and first gathers."""

_buffers: WeakValueDictionary[int, DBuffer] = WeakValueDictionary()
"""By the addresses of their shards."""

_forwards = itertools.count(1)
_of_forward: Course | None = None
_last: Course | None = None
_running: Course | None = None


def _last_route(kind: str, first: _Stop, route: Sequence[_Stop]) -> Sequence[_Stop]:
    """That of the last course that began like this one, whose route is kept in its place."""
    routes = _routes.setdefault(life(), {})
    known = routes.pop((kind, first), ())
    if not known:  # what gathers copies of shards (of hooks on saved tensors, say) begins otherwise each time
        for gone in [key for key in routes if any(source.expired() for source in key[1].sources)]:
            del routes[gone]
    routes[kind, first] = route
    return known


def _buffer_of(shard: Tensor) -> DBuffer | None:
    buffer = _buffers.get(shard.data_ptr())
    own = buffer is not None and buffer.shard.data_ptr() == shard.data_ptr() and buffer.shard.dtype == shard.dtype
    return buffer if own else None


@contextlib.contextmanager
def forward_of(module: nn.Module, buffers: Iterable[DBuffer]) -> Iterator[None]:
    """Around a forward that is in no other's, of a module with these buffers: graphs in it make a course."""
    global _of_forward
    number = next(_forwards)
    for buffer in buffers:
        if not is_shape(buffer.shard):
            _buffers[buffer.shard.data_ptr()] = buffer
        buffer.forward = number
        if buffer.model.root is module:
            buffer.model.forward = number
    around, _of_forward = _of_forward, Course("training" if torch.is_grad_enabled() else "evaluation")
    try:
        yield
        _of_forward.end()
    finally:
        _of_forward = around


@contextlib.contextmanager
def running(graph: GraphSlots | None) -> Iterator[int]:
    """Around a call of a graph, which takes turns unless it is None; yields whose turn it is. What graphs before it
    left in flight is waited for, where this one may write to their slots."""
    global _last, _running
    course = _course() if graph is not None else None
    if _last is not None and _last is not course and graph is not None:
        last, _last = _last, None
        last.end()
    if course is None or graph is None:
        settle()
        yield 0
        return
    turn = course.enter(graph)
    _last = _running = course
    try:
        yield turn
    finally:
        _running = None


def forget() -> None:
    """Of a life that has ended, in which nothing arrives any more."""
    global _last
    _last = None


def memory_of_gather(shard: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory [numel] that ``shard`` is gathered into next, which the graph before may have begun."""
    return shard.new_empty(numel, dtype=dtype) if _running is None else _running.memory_of_gather(shard, numel, dtype)


def gather(pairs: Pairs, group: str, start: Start) -> Pending:
    """Launches a gather, which the graph before it may have done."""
    return start(pairs, group) if _running is None else _running.gather(pairs, group, start)


def _course() -> Course | None:
    """That which a graph runs in now."""
    if not in_backward():
        return _of_forward
    backward = running_backward()
    if backward.course is None:
        backward.course = Course("backward")
        backward.at_end(Course, backward.course.end)
    return backward.course
