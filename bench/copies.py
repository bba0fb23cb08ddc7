"""Counts the bytes that one training step copies on the communication path, from a profile of it.

Communication memory is what a collective of the step reads or writes. A copy is an operator that moves values as
they are (``copy_``, ``cat``, ``_chunk_cat``, ``split_with_sizes_copy``, ``_foreach_copy_``), or the part of an
Inductor kernel that stores what it has loaded. Counted is every byte that a copy writes, if it reads or writes
communication memory: the copy into a bucket before a collective, the copy out of one after it, the copy of a
parameter or a gradient. A copy that changes the dtype is a cast, and counted apart.

Not counted: what a communication library moves inside a collective (gloo copies both ways), since all systems pay
it alike; arithmetic that writes communication memory, as a kernel that computes a gradient where it is sent from,
or DDP's division on the way into its buckets; a copy into memory that is only copied on from there.

Memory lives longer than what is in it. A storage is told from the one that had its address before, and counts only
while it holds what a collective has written, or what one is going to read; a storage that was there before the
step (a shard, say) always counts if a collective of the step takes it.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inductor_kernels import Kernel
from torch._C._profiler import _EventType, _TensorMetadata
from traffic import KINDS

GATHERS = ("vescale::start_all_gather", "vescale::carry_all_gather", "vescale::take_all_gather")
"""All-gathers made of messages between the ranks. That a rank places its own part in the result too is what every
all-gather does, in the libraries' out of sight; a cast on the way counts."""

PRODUCTS = ("aten::addmm", "aten::baddbmm")
"""Operators that begin with a copy of what they add to: part of their arithmetic"""

LIBRARIES = ("c10d::", "gloo:", "nccl:")
"""Names of events that are a communication library at work, on the caller's thread or its own"""

CUDA_ROUNDING = 512
"""bytes to which CUDA's caching allocator rounds up"""


Storage = tuple[int | None, int]
"""An address, and how often it was allocated in the step so far: 0 if the storage was there before. An empty tensor
has none."""


@dataclass
class Copies:
    """Bytes written by copies from or to communication memory, on one rank."""

    copied_bytes: int = 0
    cast_bytes: int = 0
    by_operator: dict[str, int] = field(default_factory=dict)
    """of both, by the operator or kernel that wrote them"""


def count(events: Iterable[Any], kernels: Mapping[str, Kernel]) -> Copies:
    """The copies in a profile.

    Args:
        events: roots of a profile's event tree, recorded with shapes and memory.
        kernels: what Inductor's kernels do, by the name of their events.
    """
    profile = _Profile(kernels)
    # A library's own threads allocate and free what nothing else sees, at times that are not to be relied on.
    callers = [event for event in events if not event.name.startswith(LIBRARIES) or event.name.startswith("c10d::")]
    for event in sorted(callers, key=lambda event: event.start_time_ns):
        profile.read(event, in_library=False)
    found = Copies()
    for copy in profile.copies:
        if not profile.communicated(copy):
            continue
        if copy.casts:
            found.cast_bytes += copy.bytes
        else:
            found.copied_bytes += copy.bytes
        found.by_operator[copy.operator] = found.by_operator.get(copy.operator, 0) + copy.bytes
    return found


class _Copy(NamedTuple):
    """One tensor's copy, at a time in nanoseconds."""

    operator: str
    time: int
    source: Storage
    targets: frozenset[Storage]
    bytes: int
    casts: bool


class _Profile:
    """What a profile says of memory."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.copies: list[_Copy] = []
        self.allocations: dict[int | None, int] = defaultdict(int)
        """how many there were so far, by address"""
        self.sizes: dict[Storage, int] = {}
        """of the storages allocated in the step, in bytes"""
        self.library: set[Storage] = set()
        """storages that a communication library has allocated for itself"""
        self.uses: dict[Storage, list[tuple[int, bool]]] = defaultdict(list)
        """of a storage: when a collective took it (True), or when it was written anew as a whole (False)"""

    def communicated(self, copy: _Copy) -> bool:
        """Whether a copy is from or to communication memory."""
        if self.library & {copy.source, *copy.targets}:
            return False
        return self._is_communication(copy.source, copy.time, before=True) or any(
            self._is_communication(target, copy.time, before=False) for target in copy.targets
        )

    def _is_communication(self, storage: Storage, time: int, *, before: bool) -> bool:
        """Whether the last use of a storage up to a time, or the next one after it, is a collective's."""
        uses = sorted(self.uses.get(storage, ()))
        if storage not in self.sizes:
            return any(by_collective for _, by_collective in uses)
        times = [used for used, _ in uses]
        place = bisect.bisect_right(times, time) - (1 if before else 0)
        return 0 <= place < len(uses) and uses[place][1]

    def read(self, event: Any, in_library: bool) -> None:
        """Takes in an event and all below it."""
        tag, fields = event.typed
        if tag == _EventType.Allocation and fields.alloc_size > 0:
            self.allocations[fields.ptr] += 1
            storage = self._at(fields.ptr)
            self.sizes[storage] = fields.alloc_size
            if in_library:
                self.library.add(storage)
        inputs: Sequence[Any] = fields.inputs if tag == _EventType.TorchOp else ()
        time = event.start_time_ns
        if event.name.startswith(LIBRARIES):
            in_library = True
            if event.name.removeprefix("c10d::") in KINDS:
                for tensor in _tensors(inputs):
                    self.uses[self._at(tensor.storage_data_ptr)].append((time, True))
        before = len(self.copies)
        for child in event.children:
            self.read(child, in_library)
        if event.name in GATHERS:
            self.copies[before:] = [copy for copy in self.copies[before:] if copy.casts]
        elif event.name in PRODUCTS:
            del self.copies[before:]
        # Where operators are made of others, the innermost is the one that copies.
        if not in_library and len(self.copies) == before:
            self.copies += self._copies(event, inputs)
        for storage in self._filled(event.name, inputs):
            self.uses[storage].append((time, False))

    def _at(self, address: int | None) -> Storage:
        return address, self.allocations[address]

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
            unwritten[storage] -= math.prod(tensor.sizes) * tensor.dtype.itemsize
        return (storage for storage, left in unwritten.items() if left <= 0)

    def _copies(self, event: Any, inputs: Sequence[Any]) -> Iterator[_Copy]:
        if event.name in self.kernels:
            moved = _in_kernel(inputs, self.kernels[event.name])
        elif event.name in _OPERATORS:
            moved = _OPERATORS[event.name](inputs)
        else:
            return
        results = {self._at(child.typed[1].ptr) for child in event.children if child.typed[0] == _EventType.Allocation}
        for source, target, extent in moved:
            dtype = source.dtype if target is None else target.dtype
            yield _Copy(
                event.name,
                event.start_time_ns,
                self._at(source.storage_data_ptr),
                frozenset(results if target is None else {self._at(target.storage_data_ptr)}),
                math.prod(extent.sizes) * dtype.itemsize,
                source.dtype != dtype,
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
