"""Counts the bytes that one training step copies on the communication path, from a profile of it.

Communication memory is what a collective of the step reads or writes. A copy is an operator that moves values as
they are (``copy_``, ``cat``, ``_chunk_cat``, ``split_with_sizes_copy``, ``_foreach_copy_``), or the part of an
Inductor kernel that stores what it has loaded. Counted is every byte that a copy writes, if it reads or writes
communication memory: the copy into a bucket before a collective, the copy out of one after it, the copy of a
parameter or a gradient. Two kinds are counted apart. A copy that changes the dtype is a cast. A copy into the buffer of
an all-gather in place, one that sends this rank's part from where it brings the others', is a copy-in: it only puts the
shard where an all-gather has to bring it. Another all-gather does that itself, in the library's out of sight.

Not counted: what a communication library moves inside a collective (gloo copies both ways), since all systems pay
it alike; arithmetic that writes communication memory, as a kernel that computes a gradient where it is sent from,
or DDP's division on the way into its buckets; a copy into memory that is only copied on from there.

Memory lives longer than what is in it. A storage is told from the one that had its address before, and counts only
while it holds what a collective has written, or what one is going to read; a storage that was there before the
step (a shard, say) always counts if a collective of the step takes it.
"""

from __future__ import annotations

import bisect
import enum
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inductor_kernels import Kernel
from torch._C._profiler import _EventType, _TensorMetadata
from traffic import KINDS

OURS = "vescale::"
"""Begins the names of our operators. Those whose collective is made of messages between the ranks gather in place."""

REDUCTIONS = ("vescale::start_reduce_scatter", "vescale::start_reduce_scatter_quantized")
"""Those that reduce into their second argument, which no message is received in"""

PRODUCTS = ("aten::addmm", "aten::baddbmm")
"""Operators that begin with a copy of what they add to: part of their arithmetic"""

AUTOGRAD = "autograd::engine::"
"""Begins the names of events that are steps of a backward"""

LIBRARIES = ("c10d::", "gloo:", "nccl:")
"""Names of events that are a communication library at work, on the caller's thread or its own"""

CUDA_ROUNDING = 512
"""bytes to which CUDA's caching allocator rounds up"""


Storage = tuple[int | None, int]
"""An address, and how often it was allocated in the step so far: 0 if the storage was there before. An empty tensor
has none."""


class Form(enum.Enum):
    """What a copy from or to communication memory is."""

    COPY = "copy"
    COPY_IN = "copy-in"
    CAST = "cast"


@dataclass
class Copies:
    """Bytes written by copies from or to communication memory, on one rank."""

    copied_bytes: int = 0
    cast_bytes: int = 0
    copy_in_bytes: int = 0
    by_operator: dict[str, int] = field(default_factory=dict)
    """of all of them, by the operator or kernel that wrote them"""


class Where(NamedTuple):
    """Where in a step an event stands."""

    library: bool = False  # inside a communication library
    backward: bool = False  # called by autograd
    operator: Any = None  # the event of the innermost operator of ours that it is, or is part of


class Copy(NamedTuple):
    """One tensor's copy, at a time in nanoseconds."""

    operator: str
    time: int
    source: Storage
    targets: frozenset[Storage]
    bytes: int
    casts: bool
    where: Where


class Use(NamedTuple):
    """A collective that took a storage; or, with no kind, an operator that wrote it anew from end to end."""

    time: int
    kind: str
    in_place: bool
    where: Where


def count(events: Iterable[Any], kernels: Mapping[str, Kernel]) -> Copies:
    """The copies in a profile.

    Args:
        events: roots of a profile's event tree, recorded with shapes and memory.
        kernels: what Inductor's kernels do, by the name of their events.
    """
    forms: Counter[Form] = Counter()
    by_operator: Counter[str] = Counter()
    for copy, form, _ in Profile(events, kernels).communicated():
        forms[form] += copy.bytes
        by_operator[copy.operator] += copy.bytes
    return Copies(forms[Form.COPY], forms[Form.CAST], forms[Form.COPY_IN], dict(by_operator))


class Profile:
    """What a profile says of memory."""

    def __init__(self, events: Iterable[Any], kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.copies: list[Copy] = []
        self.allocations: dict[int | None, int] = defaultdict(int)
        """how many there were so far, by address"""
        self.sizes: dict[Storage, int] = {}
        """of the storages allocated in the step, in bytes"""
        self.library: set[Storage] = set()
        """storages that a communication library has allocated for itself"""
        self.uses: dict[Storage, list[Use]] = defaultdict(list)
        self.collectives: list[tuple[str, int, Where]] = []
        """the kind and bytes of each, and where it was called"""
        self.taken: dict[Storage, Where] = {}
        """storages that operators of ours take, and the first that did"""
        # A library's own threads allocate and free what nothing else sees, at times that are not to be relied on.
        callers = [event for event in events if not event.name.startswith(LIBRARIES) or event.name.startswith("c10d::")]
        for event in sorted(callers, key=lambda event: event.start_time_ns):
            self._read(event, Where())

    def communicated(self) -> Iterator[tuple[Copy, Form, Use]]:
        """The copies from or to communication memory, and for each the collective that makes it one."""
        for copy in self.copies:
            if self.library & {copy.source, *copy.targets}:
                continue
            uses = [self._use(target, copy.time, before=False) for target in copy.targets]
            uses.append(self._use(copy.source, copy.time, before=True))
            use = next(filter(None, uses), None)
            if use is not None:
                copied_in = use.in_place and use.time > copy.time
                yield copy, Form.CAST if copy.casts else Form.COPY_IN if copied_in else Form.COPY, use

    def _use(self, storage: Storage, time: int, *, before: bool) -> Use | None:
        """The last use of a storage up to a time, or the next one after it, if that is a collective's."""
        uses = sorted(self.uses.get(storage, ()), key=lambda use: use.time)
        was_there = storage not in self.sizes
        if was_there:
            uses = [use for use in uses if use.kind]
        place = bisect.bisect_right([use.time for use in uses], time) - (1 if before else 0)
        if was_there and uses:
            return uses[min(max(place, 0), len(uses) - 1)]
        return uses[place] if 0 <= place < len(uses) and uses[place].kind else None

    def _read(self, event: Any, where: Where) -> None:
        """Takes in an event and all below it."""
        tag, fields = event.typed
        if tag == _EventType.Allocation and fields.alloc_size > 0:
            self.allocations[fields.ptr] += 1
            storage = self._at(fields.ptr)
            self.sizes[storage] = fields.alloc_size
            if where.library:
                self.library.add(storage)
        inputs: Sequence[Any] = fields.inputs if tag == _EventType.TorchOp else ()
        if event.name.startswith(LIBRARIES):
            where = where._replace(library=True)
            if kind := KINDS.get(event.name.removeprefix("c10d::")):
                self._collective(event, kind, inputs, where)
        elif event.name.startswith(AUTOGRAD):
            where = where._replace(backward=True)
        elif event.name.startswith(OURS):
            where = where._replace(operator=event)
            for storage in self._storages(inputs):
                self.taken.setdefault(storage, where)
            if event.name in REDUCTIONS:
                for storage in self._storages(inputs[1:2]):
                    self.uses[storage].append(Use(event.start_time_ns, "reduce_scatter", False, where))
        before = len(self.copies)
        for child in event.children:
            self._read(child, where)
        if event.name in PRODUCTS:
            del self.copies[before:]
        if not where.library:
            self.copies += self._copies_itself(event, inputs, where, self.copies[before:])
        for storage in self._filled(event.name, inputs):
            self.uses[storage].append(Use(event.start_time_ns, "", False, where))

    def _collective(self, event: Any, kind: str, inputs: Sequence[Any], where: Where) -> None:
        if kind == "all_gather":
            in_place = not self._storages(inputs[:1]).isdisjoint(self._storages(inputs[1:2]))
        else:
            in_place = where.operator is not None and "all_gather" in where.operator.name
        for storage in self._storages(inputs):
            self.uses[storage].append(Use(event.start_time_ns, kind, in_place, where))
        sizes = [sum(map(_nbytes, _tensors([argument]))) for argument in inputs]
        self.collectives.append((kind, max(sizes), where))

    def _at(self, address: int | None) -> Storage:
        return address, self.allocations[address]

    def _storages(self, inputs: Iterable[Any]) -> set[Storage]:
        return {self._at(tensor.storage_data_ptr) for tensor in _tensors(inputs)}

    def _filled(self, operator: str, inputs: Sequence[Any]) -> Iterator[Storage]:
        """Storages of the step that are written anew from end to end: so Inductor uses them again."""
        if operator in self.kernels:
            written = [inputs[position] for position in self.kernels[operator].written]
        else:
            written = list(_tensors(inputs[_OUT_POSITIONS.get(operator, len(inputs)) :]))
        unwritten: dict[Storage, float] = {}
        for tensor in written:
            storage = self._at(tensor.storage_data_ptr)
            rounding = CUDA_ROUNDING if tensor.device.type == "cuda" else 1
            unwritten.setdefault(storage, self.sizes.get(storage, math.inf) - rounding + 1)
            unwritten[storage] -= _nbytes(tensor)
        return (storage for storage, left in unwritten.items() if left <= 0)

    def _copies_itself(self, event: Any, inputs: Sequence[Any], where: Where, within: Sequence[Copy]) -> list[Copy]:
        """What an event copies unless an operator that it is made of has copied that. On GPUs some only copy a table of
        addresses, for a kernel of their own."""
        copied = list(self._copies(event, inputs, where))
        ends = {end for copy in copied for end in (copy.source, *copy.targets)}
        return [] if any(ends & {copy.source, *copy.targets} for copy in within) else copied

    def _copies(self, event: Any, inputs: Sequence[Any], where: Where) -> Iterator[Copy]:
        if event.name in self.kernels:
            moved = _in_kernel(inputs, self.kernels[event.name])
        elif event.name in _OPERATORS:
            moved = _OPERATORS[event.name](inputs)
        else:
            return
        results = {self._at(child.typed[1].ptr) for child in event.children if child.typed[0] == _EventType.Allocation}
        for source, target, extent in moved:
            dtype = source.dtype if target is None else target.dtype
            yield Copy(
                event.name,
                event.start_time_ns,
                self._at(source.storage_data_ptr),
                frozenset(results if target is None else {self._at(target.storage_data_ptr)}),
                math.prod(extent.sizes) * dtype.itemsize,
                source.dtype != dtype,
                where,
            )


_OUT_POSITIONS = {"aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}
"""Where the out tensor of an operator stands that Inductor calls with one"""

_Moved = tuple[Any, Any, Any]
"""A source, the tensor that it goes to (None: a new one), and the one of the two that is as large as what moves"""


def _in_kernel(inputs: Sequence[Any], kernel: Kernel) -> Iterator[_Moved]:
    for source, target in kernel.copies:
        ends = inputs[source], inputs[target]
        yield *ends, min(ends, key=lambda tensor: math.prod(tensor.sizes))


def _copy(inputs: Sequence[Any]) -> Iterator[_Moved]:
    """``copy_(target, source)``, and lists of both for ``_foreach_copy_``"""
    for target, source in zip(_tensors(inputs[:1]), _tensors(inputs[1:2]), strict=True):
        yield source, target, target


def _join(inputs: Sequence[Any]) -> Iterator[_Moved]:
    """``cat(sources, dim)`` and ``_chunk_cat(sources, dim, chunks)``; the target may follow"""
    target = next(_tensors(inputs[1:]), None)
    for source in _tensors(inputs[:1]):
        yield source, target, source


def _split(inputs: Sequence[Any]) -> Iterator[_Moved]:
    """``split_with_sizes_copy(source, sizes, dim)``; the list of targets may follow"""
    targets = list(_tensors(inputs[1:]))
    for target in targets or [None]:
        yield inputs[0], target, target or inputs[0]


_OPERATORS: dict[str, Callable[[Sequence[Any]], Iterator[_Moved]]] = {
    "aten::copy_": _copy,
    "aten::_foreach_copy_": _copy,
    "aten::cat": _join,
    "aten::_chunk_cat": _join,
    "aten::split_with_sizes_copy": _split,
}


def _tensors(inputs: Iterable[Any]) -> Iterator[Any]:
    """The tensors among an event's arguments, those in lists too."""
    for value in inputs:
        if isinstance(value, list):
            yield from _tensors(value)
        elif isinstance(value, _TensorMetadata):
            yield value


def _nbytes(tensor: Any) -> int:
    return math.prod(tensor.sizes) * int(tensor.dtype.itemsize)
