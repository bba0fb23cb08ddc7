"""Static memory for communication, which all compiled graphs of a process share.

Graphs run one after another, and what communication memory holds seldom outlives the graph that filled it. So all of
them use the same, whatever their dtypes: gathered parameters in bfloat16 lie where the backward has gradients in
float32. It is as large as the largest that a living graph asked for, and each graph's slots are places in it. What a
forward leaves for a backward lies in memory set apart for that, for its process group and its dtype: a graph of another
group, where groups overlap, or of a model of another dtype may run in between. Memory is allocated when a graph is
first called, all that it and its backward use together, and freed with the last graph that uses it. It comes from
PyTorch's allocator, or, where it was asked for, from the registered memory of a process group.

Graphs of layers that are compiled one by one have such memory twice, and take turns: while one of them runs, what the
graph before it has left in flight goes on, and what the next one begins with comes (``courses.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from . import arrivals, courses
from .collectives import follow_all
from .ops import end_failed_graph, forget_launched
from .registered import allocate_registered
from .streams import Reached

ALIGNMENT = 128
"""Bytes of which slots begin at multiples: a line of a GPU's cache, two of a CPU's."""


class SlotSpec(NamedTuple):
    """What a graph wants of a slot.

    Attributes:
        carried: the process group, if it is set apart for what a forward leaves for a backward.
        offset: bytes from the beginning of its memory.
        by_dtype: whether its dtype has memory of its own.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    carried: str = ""
    offset: int = 0
    by_dtype: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def memory(self) -> Hashable:
        """Which memory it is a place in.

        Codes of quantized values have memory of their own. What they leave in padding would be NaN as a gradient, which
        two finite numbers of 16 bits, read as one of 32, never are; halves of one of 32 may be, so where NaN is looked
        for each dtype has memory of its own.
        """
        apart = self.by_dtype or bool(self.carried)
        return (self.dtype if apart else self.dtype.is_floating_point, self.device, self.carried)

    def overlaps(self, other: SlotSpec) -> bool:
        """Whether two slots have bytes in common."""
        return self.memory == other.memory and self.offset < other.end and other.offset < self.end


class _Memory:
    """Memory in bytes; grows when a graph comes that wants more."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device = device
        self.group = group  # whose registered memory it is
        self.tensor: Tensor | None = None
        self._stream: torch.Stream | None = None  # the one that a GPU's allocator gives it to again
        self._slots: dict[SlotSpec, Tensor] = {}

    def grow(self, nbytes: int) -> None:
        """Has it hold that many bytes at least. What it held is lost if it holds fewer."""
        if self.tensor is not None and self.tensor.numel() >= nbytes:
            return
        stream = torch.accelerator.current_stream(self.device) if self.device.type == "cuda" else None
        if stream is not None and self._stream not in (None, stream):
            self._stream.wait_stream(stream)  # by now it comes after all that used this memory
        self._stream = stream
        self._slots.clear()
        self.tensor = None  # freed before its successor is allocated
        with torch.inference_mode(False):  # the next graph may train
            self.tensor = self._allocate(nbytes)

    def take(self, spec: SlotSpec) -> Tensor:
        """A slot in it. There may be a hundred in a graph: each is made once."""
        slot = self._slots.get(spec)
        if slot is None:
            assert self.tensor is not None
            with torch.inference_mode(False):
                slot = self._slots[spec] = self.tensor.narrow(0, spec.offset, spec.nbytes).view(spec.dtype)
        return slot

    def _allocate(self, nbytes: int) -> Tensor:
        """Zeroed: padding is sent too, and NCCL's check for NaN (``TORCH_NCCL_NAN_CHECK``) must find none there."""
        if self.group is not None:
            return allocate_registered(nbytes, self.device, self.group).zero_()
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)


_last_use: dict[torch.device, Reached] = {}
"""Of slots on each GPU, by the last graph."""


def _follow_last_use(device: torch.device) -> None:
    """Slots are every graph's, so a graph on one stream comes after one on another."""
    if device in _last_use:
        _last_use[device].follow()


def _check_not_recorded() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"[rank {dist.get_rank()}] a compiled graph of sharded parameters was called while a CUDA graph is "
            "recorded. Which memory it takes, and what it launches ahead for the next, is decided at each call: leave "
            "out torch.cuda.graph"
        )


_running = False
"""Whether a graph runs now."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Around a graph, which has the slots to itself.

    Raises:
        RuntimeError: another runs: on another thread, or this one is called by an operator of it.
    """
    global _running
    if _running:
        raise RuntimeError(
            f"[rank {dist.get_rank()}] a compiled graph of sharded parameters was called while another runs, from "
            "another thread or from an operator in it. They share the memory that parameters are gathered into: call "
            "one after the other"
        )
    _running = True
    try:
        yield
    finally:
        _running = False


_world: ref[dist.ProcessGroup] | None = None  # in which the last graph ran


def _forget_former_world() -> None:
    """Where the default process group is another than it was (a program goes on after ranks had failed, say), what
    graphs had left in flight is forgotten: waiting for it fails."""
    global _world
    world = dist.group.WORLD
    if world is not None and (_world is None or _world() is not world):
        _world = ref(world)
        courses.forget()
        arrivals.forget()
        forget_launched()


_memories: WeakValueDictionary[tuple[dist.ProcessGroup | None, int | None, Hashable], _Memory] = WeakValueDictionary()
"""By whose registered memory it is, whose turn it is for, and :attr:`SlotSpec.memory`."""


class GraphSlots:
    """A graph's slots: for each turn a memory of its own that each is a place in, and the bytes that the graph and its
    backward want of such memories."""

    def __init__(
        self, specs: Sequence[SlotSpec], memories: Sequence[Sequence[_Memory]], wanted: Sequence[dict[_Memory, int]]
    ) -> None:
        self._specs = specs
        self._memories = memories
        self._wanted = wanted

    def all(self, turn: int) -> list[Tensor]:
        return self.numbered(range(len(self._specs)), turn)

    def numbered(self, numbers: Sequence[int], turn: int) -> list[Tensor]:
        for memory, nbytes in self._wanted[turn].items():
            memory.grow(nbytes)
        return [self._memories[turn][number].take(self._specs[number]) for number in numbers]

    def numbers_of(self, tensors: Sequence[Tensor], turn: int) -> list[int | None]:
        """Which slots the tensors are; None for one that is no slot."""
        numbers = {_place(slot): number for number, slot in enumerate(self.all(turn))}
        return [numbers.get(_place(tensor)) for tensor in tensors]


def _place(tensor: Tensor) -> tuple[int, int, torch.dtype]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


class StepSlots:
    """The slots of a compilation's graphs, a forward and its backward: allocated when the first of them is called."""

    def __init__(self, registered: dist.ProcessGroup | None = None, *, turns: int = 1) -> None:
        """
        Args:
            registered: the process group whose registered memory the slots are; None for PyTorch's allocator.
            turns: 1, or as many as graphs take in a course (``courses.py``).
        """
        self._registered = registered
        self._turns: Sequence[int | None] = range(turns) if turns > 1 else (None,)
        self._wanted: list[dict[_Memory, int]] = [{} for _ in self._turns]  # bytes, of all graphs

    def add(self, run: Callable[[list[Any]], Any], specs: Sequence[SlotSpec]) -> Callable[[list[Any]], Any]:
        """A boxed function that calls ``run``, another, with the slots ``specs`` after its own arguments.

        What the graphs before it left in flight, out of slots that this one may write, is waited for first, also where
        one of them raised; and on a GPU the last of them itself, where it ran on another stream.
        """
        memories = [[self._reserved(spec, turn) for spec in specs] for turn in self._turns]
        for wanted, of_turn in zip(self._wanted, memories, strict=True):
            for memory, spec in zip(of_turn, specs, strict=True):
                wanted[memory] = max(wanted.get(memory, 0), spec.end)
        slots = GraphSlots(specs, memories, self._wanted)
        gpus = sorted({spec.device for spec in specs if spec.device.type == "cuda"}, key=str)
        in_course = slots if len(self._turns) > 1 else None

        def call(args: list[Any]) -> Any:
            if gpus:
                _check_not_recorded()
            _forget_former_world()
            with _alone(), courses.running(in_course) as turn:
                end_failed_graph()
                for device in gpus:
                    _follow_last_use(device)
                try:
                    args.extend(slots.all(turn))
                    return run(args)
                except BaseException:
                    for device in gpus:
                        follow_all(device)
                    raise
                finally:
                    for device in gpus:
                        _last_use[device] = Reached.by_now(device)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _reserved(self, spec: SlotSpec, turn: int | None) -> _Memory:
        """What is carried from one graph to another is in one place for both."""
        key = self._registered, None if spec.carried else turn, spec.memory
        return _memories.setdefault(key, _Memory(spec.device, self._registered))


def with_fresh_slots(run: Callable[[list[Any]], Any], specs: Sequence[SlotSpec]) -> Callable[[list[Any]], Any]:
    """:meth:`StepSlots.add` without the pool: for graphs that are run once, and for tensors that only have shapes,
    which no other graph may be given."""

    def call(args: list[Any]) -> Any:
        args.extend(torch.empty(spec.numel, dtype=spec.dtype, device=spec.device) for spec in specs)
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def pooled_bytes(graphs: Iterable[Sequence[SlotSpec]], turns: int = 1) -> int:
    """What the slots of several graphs take together, which have the same memory, for each of so many turns."""
    ends: dict[Hashable, int] = {}
    for spec in chain.from_iterable(graphs):
        ends[spec.memory] = max(ends.get(spec.memory, 0), spec.end * (1 if spec.carried else turns))
    return sum(ends.values())
