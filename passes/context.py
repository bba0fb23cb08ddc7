"""What passes know: typed descriptions of the graph's units and of its collectives."""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from ..cost import Cluster
from ..runtime.courses import TURNS
from ..runtime.model import Beside
from ..runtime.pool import SlotSpec
from ..runtime.unshard import CommSpec, ParamView
from .prediction import Prediction
from .summary import SlotUse, Summary


class Stage(enum.Enum):
    """The graph a pass works on."""

    CAPTURED = "captured"  # Dynamo's graph: torch functions, parameters as inputs
    JOINT = "joint"  # AOTAutograd's: forward and backward in one, aten operators
    PARTITIONED = "partitioned"  # the forward, the backward, or a forward without a backward


class Part(enum.Enum):
    """Which graph of the partitioned stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


class Lowering(enum.Enum):
    """What runs the final graphs."""

    INDUCTOR = "inductor"  # generated code
    EAGER = "eager"  # the graphs as they are, operator by operator


class Role(enum.Enum):
    """Which half of a collective a node is; a carried one has its halves in two graphs."""

    LAUNCH = "launch"
    WAIT = "wait"
    LEAVE = "leave"  # in flight when the backward ends; who reads the gradients waits
    CARRY = "carry"  # launched in the forward, for the backward
    TAKE = "take"  # waited for in the backward


@dataclass(frozen=True)
class Comm:
    """What a collective's node is, under ``node.meta["vescale"]``: put there at insertion, never guessed later."""

    kind: str  # ALL_GATHER or REDUCE_SCATTER
    role: Role
    unit: int  # ordinal in CompileContext.units


class Use(enum.Enum):
    """What a communication buffer holds."""

    PARAMETERS = "gathered parameters"  # [world_size * S]
    PACKED = "gathered codes and scales"  # [world_size * P] bytes, of parameters that are quantized
    GRADIENTS = "gradients"  # [world_size * S]
    REDUCED = "reduced gradients"  # [S]
    SCRATCH = "scratch of a reduction"


@dataclass(frozen=True)
class Buffer:
    """What a node is whose result is communication memory, under ``node.meta["vescale"]``."""

    use: Use
    unit: int
    carried: str = ""  # the process group, if it is filled for the backward while the forward ends


def comm_of(node: fx.Node) -> Comm | None:
    mark = node.meta.get("vescale")
    return mark if isinstance(mark, Comm) else None


def shared_text(launch: fx.Node) -> str:
    """Says of a launch whether it shares a collective with the one behind it."""
    return ", with the next" if launch.kwargs.get("with_next") else ""


def buffer_of(node: fx.Node) -> Buffer | None:
    mark = node.meta.get("vescale")
    return mark if isinstance(mark, Buffer) else None


def is_allocation(buffer: fx.Node) -> bool:
    """Whether a communication buffer is memory of its own, and no part of a slot."""
    return buffer.target is not torch.ops.aten.slice.Tensor


def marked_buffer(node: fx.Node) -> Buffer:
    """:func:`buffer_of` a node that is known to be one."""
    mark = buffer_of(node)
    assert mark is not None
    return mark


@dataclass(frozen=True)
class Copied:
    """What a node is that copies a gradient into its place, under ``node.meta["vescale"]``."""

    unit: int
    why: str


@dataclass(frozen=True)
class GraphUnit:
    """One unit's buffer as an input of the graph.

    Attributes:
        name: of the unit that was there at capture; the graph may serve others laid out alike.
        shard: example of the flat shard, [S].
        views: the parameters that the graph reads.
        others: parameters of the unit that the graph does not read.
        comm: sizes, dtypes and process group of its collectives.
        reshard_after_forward: gather again in the backward, unless memory allows to keep it.
        accumulates: whether gradients may accumulate.
        reductions: example of the handle of its reductions, if gradients accumulate or are quantized, else None.
        block: the name of what it is a part of; "" if it is none.
        stride: how many ranks each of those that it is sharded over comes after the one before.
        replica_stride: the same of those that hold the same shard.
    """

    name: str
    shard: Tensor
    views: tuple[ParamView, ...]
    others: tuple[ParamView, ...]
    comm: CommSpec
    reshard_after_forward: bool
    accumulates: bool = False
    reductions: Tensor | None = None
    block: str = ""
    stride: int = 1
    replica_stride: int = 1

    @property
    def inputs(self) -> tuple[tuple[str, Tensor | None], ...]:
        """Examples of the graph's inputs that stand for the unit, in their order; None where there is none."""
        return ("shard", self.shard), ("reductions", self.reductions)

    @property
    def numel(self) -> int:
        """Elements of its gathered buffer, padding included."""
        return self.comm.world_size * self.shard.numel()

    @property
    def shard_bytes(self) -> int:
        return self.shard.numel() * self.shard.itemsize

    @property
    def places(self) -> str:
        """A digest of where all its parameters lie, equal on all ranks."""
        places = sorted((view.offset, view.shape) for view in (*self.views, *self.others))
        return hashlib.sha256(repr(places).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class ParamInput:
    """A placeholder of the captured graph that is a sharded parameter."""

    unit: int  # ordinal in CompileContext.units
    view: int  # index in GraphUnit.views
    name: str


@dataclass(frozen=True)
class Need:
    """What a graph of a step takes, apart from shards and optimizer states.

    Attributes:
        slots: its static memory.
        peak: its fullest moment outside slots, bytes.
        allowance: bytes with which this graph can gather and reduce one unit ahead.
    """

    slots: tuple[SlotSpec, ...]
    peak: int
    allowance: int


@dataclass
class CompileContext:
    """One compilation: what the passes read, and what they find out for those after them.

    Attributes:
        rank: this process's rank, for messages.
        lowering: what will run the graphs.
        cluster: what the cost model predicts for.
        wanted_cluster: how the user named it, on all ranks alike; what ranks find there may differ.
        wanted_budget: the budget that was asked for, as text.
        state_bytes: what an optimizer with two states for each trained parameter keeps on a rank.
        memory_budget: bytes that a step may take on a rank, without optimizer states. None: time is weighed against
            memory, from what gathering and reducing one unit ahead takes.
        float32_products: whether matrix products of half precision can be had as the float32 that they are summed up
            in.
        beside: what the step takes beside this graph.
        decide: takes a question and this rank's answer, and returns the one that holds on all ranks.
        units: units in the order in which the graph first needs them.
        params: sharded parameters by the position of their placeholder in the captured graph.
        reduced_units: units in the order in which the joint graph reduces their gradients.
        kept: units that may be resharded and are kept for the backward, because memory allows it.
        imposed: those of the units kept that were so decided elsewhere, and that this rank would gather again.
        carried: units whose gather for the backward is launched in the forward.
        saved: units by the names of inputs of the backward that are parameters gathered in the forward.
        donated: names of inputs of the backward that nothing else needs, whose memory generated code may write to.
        needs: what the graphs of the step take: those that are scheduled, and at least those that are not yet.
        gradients: by unit, the views that the joint graph has gradients for.
        results: how many of the forward's outputs are the program's own; the others are kept for the backward.
        collectives: each verified graph's collectives, in order, one line each.
        sources: in the graph of ``part``, the input that is the shard of each unit that is gathered.
        returned: in it, by their places among its outputs, the units whose reduced gradients are returned.
        moved: how often the program moves gathered parameters in the graph of ``part``, by unit and operator.
        slots: each graph's static memory, in the order of the inputs that the assign pass appends.
        slot_uses: what lies in each of them.
        predictions: each graph's time, by the schedule that was found for it.
        summaries: what is known of each final graph.
        decisions: the questions that were put to ``decide``, and what holds.
        seconds: how long it took to compile for Inductor, in another process perhaps, whose code was found.
        part: which graph the partitioned passes are working on.
    """

    rank: int
    lowering: Lowering
    cluster: Cluster
    wanted_cluster: str
    memory_budget: int | None
    wanted_budget: str
    state_bytes: int
    float32_products: bool
    beside: Beside
    decide: Callable[[str, str], str]
    units: tuple[GraphUnit, ...]
    params: dict[int, ParamInput]
    reduced_units: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    imposed: frozenset[int] = frozenset()
    carried: frozenset[int] = frozenset()
    saved: dict[str, int] = field(default_factory=dict)
    donated: frozenset[str] = frozenset()
    needs: dict[Part, Need] = field(default_factory=dict)
    gradients: dict[int, frozenset[int]] = field(default_factory=dict)
    results: int = 0
    collectives: dict[Part, list[str]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    returned: dict[int, int] = field(default_factory=dict)
    moved: Counter[tuple[int, str]] = field(default_factory=Counter)
    slots: dict[Part, tuple[SlotSpec, ...]] = field(default_factory=dict)
    slot_uses: dict[Part, tuple[SlotUse, ...]] = field(default_factory=dict)
    predictions: dict[Part, Prediction] = field(default_factory=dict)
    summaries: dict[Part, Summary] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    part: Part | None = None

    @property
    def shard_bytes(self) -> int:
        """Of all units, on this rank."""
        return sum(unit.shard_bytes for unit in self.units)

    @property
    def options(self) -> str:
        """Those that schedules depend on, as text: ranks that compile alike have the same."""
        return f"lowering={self.lowering.value}, memory_budget={self.wanted_budget}, cluster={self.wanted_cluster}"

    @property
    def standing_bytes(self) -> int:
        """What the step takes all the time, apart from slots: the same on every rank."""
        return self.shard_bytes + self.beside.standing

    @property
    def turns(self) -> int:
        """How many times there are slots: graphs of a layer that is compiled like others take turns at them."""
        return TURNS if self.beside.one_of_many else 1

    @property
    def spare(self) -> int | None:
        """Bytes that the step may take where it need not: what forwards before it leave of a memory budget, for the
        last graph of a step. None without a budget, or where nobody knows what graphs to come will need."""
        return self.memory_budget - self.beside.kept if self.memory_budget is not None and self.beside.last else None

    def named(self, buffer: Buffer) -> str:
        """What a buffer holds, and of which unit."""
        return f"{buffer.use.value} of {self.units[buffer.unit].name}"

    def room(self, allowance: int, apart: int) -> int:
        """Bytes that a step is to take at most, with the slots of one turn: what is spare, or an ``allowance`` for
        overlap within the budget; ``apart`` of them outside of slots."""
        if self.spare is not None:
            return self.spare
        return allowance if self.memory_budget is None else min(allowance, self.budget_of_a_turn(apart))

    def budget_of_a_turn(self, apart: int) -> int:
        """Bytes that a step may take with the slots of one turn, ``apart`` of them outside of slots, so that with all
        turns' it takes no more than the memory budget."""
        assert self.memory_budget is not None
        return (self.memory_budget + (self.turns - 1) * apart) // self.turns

    def found(self) -> dict[str, Any]:
        """What passes have found out, by field: all that a compilation of an equal graph would find again."""
        return {name: getattr(self, name) for name in _FOUND}

    def resume(self, found: Mapping[str, Any]) -> None:
        """Goes on from what the passes of an equal compilation have found."""
        for name in _FOUND:
            setattr(self, name, found[name])

    def without_gradient(self, unit: int) -> list[int]:
        """Where in its buffer those parameters of a unit begin that the joint graph has no gradients for."""
        found = self.gradients.get(unit, frozenset())
        absent = [view for index, view in enumerate(self.units[unit].views) if index not in found]
        return sorted(view.offset for view in (*absent, *self.units[unit].others))

    def reshards(self, unit: int) -> bool:
        """Whether a unit is gathered again in the backward, by its ordinal."""
        return self.units[unit].reshard_after_forward and unit not in self.kept


# What has a default is for passes to find out; ``part`` says where they are.
_FOUND = tuple(
    each.name
    for each in fields(CompileContext)
    if (each.default is not MISSING or each.default_factory is not MISSING) and each.name != "part"
)


ON_SHARDS = (
    "Inside compiled code read a parameter through its module; leave what works on shards (optimizer steps, clipping) "
    "outside, or call it through torch.compiler.disable, as torch.compiler.disable(optimizer.step)(); and compile what "
    "calls backward() without torch._dynamo.config.compiled_autograd"
)
"""Ends a message on code that can't be compiled."""


class GraphError(RuntimeError):
    """A graph that must not run: a pass found what it can't compile, or the verifier a broken invariant."""


def fail(context: CompileContext, node: fx.Node | None, message: str) -> NoReturn:
    """Raises GraphError with the rank and the node."""
    at = f", at {node.format_node()}" if node is not None else ""
    raise GraphError(f"[rank {context.rank}] {message}{at}")
