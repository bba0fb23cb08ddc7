"""What kernels may read, and when. Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.

Only the scheduler's nodes say: kernels compute values anew where they use them, and are fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.codegen.cpp_utils import LocalBufferContext
from torch._inductor.dependencies import Dep, MemoryDep, StarDep, WeakDep
from torch._inductor.ir import MutationLayoutSHOULDREMOVE, TensorBox
from torch._inductor.loop_body import LoopBody
from torch._inductor.scheduler import Scheduler, SchedulerNode
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

_LAUNCHES = ("start_", "carry_")  # begin the names of our operators that return while what they write is in flight


@contextmanager
def reads_known_by_their_writes() -> Iterator[None]:
    """Has Inductor heed what a read waits for where memory, as a slot, was written before.

    Such a read goes by the name of that write. The scheduler forgets it in two places, and then moves the read before
    what it waits for, or into one loop with what overwrites other elements. Lowering makes such a loop itself, where it
    casts what it copies; and a fusion of loops takes what only waits for memory to read it, and fails.

    Such a fusion may also keep one row of what its loops hand each other, where an iteration computes several.
    """
    with (
        mock.patch.object(MutationLayoutSHOULDREMOVE, "realize_into", classmethod(_realize_into)),
        mock.patch.object(LoopBody, "get_read_expr", _get_read_expr),
        mock.patch.object(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", _may_share_outer_loops),
        mock.patch.object(Scheduler, "fusable_weak_dep", _fusable_weak_dep),
        mock.patch.object(SchedulerNode, "recompute_size_and_body", _recompute_size_and_body),
    ):
        yield


def _fusable_weak_dep(scheduler: Any, dep: WeakDep, reader: Any, writer: Any) -> bool:
    """Whether one kernel may be of ``reader``, and of ``writer``, which must come after it.

    Inductor looks at reads by the memory's own name only.
    """
    if not _fusable_as_named(scheduler, dep, reader, writer):
        return False
    names = scheduler.mutation_real_name
    (write,) = (each for each in writer.read_writes.writes if each.name == dep.mutating_buf)
    return all(_in_one_loop(read, write) for read in _reads_of(reader, names[dep.mutating_buf], names))


def _recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
    """Gives a node other loops; what it waits for stays as it was."""
    order = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, WeakDep | StarDep))
    _recompute(node, *args, **kwargs)
    node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))


def _realize_into(cls: Any, source: Any, target: Any, unsafe_alias: bool = False) -> Any:
    """Copies ``source`` into memory; what is computed from that memory is stored first, for the scheduler to fuse."""
    value = source.data if isinstance(source, TensorBox) else source
    target.realize()  # before, a view may have no name
    if target.get_name() in value.get_read_names():
        value.realize()
    return _copy_into(cls, source, target, unsafe_alias)


def _get_read_expr(body: Any, name: str) -> Any:
    """The place that a loop reads; None where it reads nothing there."""
    try:
        return _place_read(body, name)
    except KeyError:
        return None


def _may_share_outer_loops(node: Any, kernels: Sequence[Any], depth: int) -> bool:
    """Whether the loops of several kernels become one, with theirs inside; else each keeps its own.

    What one hands the next is kept for one iteration of the outer loops (PyTorch issue 185702).
    """
    context = V.local_buffer_context
    keeps_one = isinstance(context, LocalBufferContext) and context.local_buffers
    if keeps_one and any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth]):
        return False
    return bool(_share_outer_loops(node, kernels, depth))


_copy_into = MutationLayoutSHOULDREMOVE.realize_into.__func__  # type: ignore[attr-defined]
_place_read = LoopBody.get_read_expr
_share_outer_loops = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
_fusable_as_named = Scheduler.fusable_weak_dep
_recompute = SchedulerNode.recompute_size_and_body


def _reads_of(node: Any, where: str, memory: dict[str, str]) -> Iterator[Dep]:
    for read in node.read_writes.reads:
        if not isinstance(read, WeakDep) and memory.get(read.name, read.name) == where:
            yield read


def _in_one_loop(read: Dep, write: Dep) -> bool:
    """Whether a loop that reads some elements and writes some writes none before it has read it."""
    if not (isinstance(read, MemoryDep) and isinstance(write, MemoryDep)):
        return False
    read, write = read.normalize(), write.normalize()
    if (read.index, read.size) == (write.index, write.size):
        return True
    first, second = _extent(read), _extent(write)
    return bool(first.upper < second.lower or second.upper < first.lower)


def _extent(dep: MemoryDep) -> ValueRanges[Any]:
    """From the first to the last element that may be touched."""
    sizes = {name: dep.ranges.get(name, int_oo) for name in dep.index.free_symbols}
    ends = {name: size - 1 if size.is_Integer else int_oo for name, size in sizes.items()}
    return bound_sympy(dep.index, {name: ValueRanges(0, end) for name, end in ends.items()})


class CheckedReads(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]  # of 2.13
    """Runs on the fused nodes, in the order in which their code is generated.

    A turn of a piece of memory begins with each operator of ours that writes it as a whole: a launch, a wait; and with
    each write to another that has some of its bytes. A read names the write that it wants to see: it must come in that
    turn, and, but for our own operators, not while a collective is in flight there. A write comes in the turn in which
    the graph has it.

    Args:
        sharing: gives the inputs of a graph that have memory in common with others, each with all those.

    Raises:
        ValueError: the user has set a pass in the same place, which would not run.
        RuntimeError, when called: the code would compute with other parameters or gradients than the graph does.
    """

    def __init__(self, sharing: Callable[[fx.Graph], Mapping[fx.Node, Sequence[fx.Node]]]) -> None:
        self._sharing = sharing
        if torch._inductor.config._post_fusion_custom_pass is not None:
            raise ValueError(
                "backend='vescale' needs torch._inductor.config._post_fusion_custom_pass for itself, and your pass "
                "would not run: leave it out"
            )

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if nodes:
            memory = nodes[0].scheduler.mutation_real_name
            sharing = self._sharing(V.graph.graph)
            others = {slot.name: [other.name for other in all_ if other is not slot] for slot, all_ in sharing.items()}
            _check_turns([part for node in nodes for part in node.get_nodes()], memory, others)
            for node in nodes:
                _check_loop(node.get_nodes(), memory)
        return nodes

    def uuid(self) -> str:
        """Part of Inductor's cache key, in which each graph has this package's version besides."""
        return type(self).__qualname__


def _check_turns(nodes: Sequence[Any], memory: dict[str, str], others: Mapping[str, Sequence[str]]) -> None:
    places = {operation.get_operation_name(): place for place, operation in enumerate(V.graph.operations)}
    turns, turn_of, in_flight = Counter[str](), dict[str, int](), set[str]()
    written_in: dict[tuple[str, str], int] = {}  # by node and memory: the turn before it writes there
    for node in sorted(nodes, key=lambda node: places[node.get_name()]):
        operator = _our_operator(node)
        for written, where in _written(node, memory):
            written_in[node.get_name(), where] = turns[where]
            _begin_turns(turns, where, operator, others)
            turn_of[written] = turns[where]
            if operator.startswith(_LAUNCHES):
                in_flight.add(written)
    turns.clear()
    for node in nodes:
        operator = _our_operator(node)
        overwritten = {where for _, where in _written(node, memory)}  # what a quantized reduction has read, say
        reads = {each.name for each in node.read_writes.reads if not isinstance(each, WeakDep)}  # those are of an order
        for read in sorted(node.mutation_renames.get(name, name) for name in reads):
            where = memory.get(read, read)
            too_early = read in in_flight and not operator
            if where not in overwritten and (too_early or turn_of.get(read, 0) != turns[where]):
                _refuse(f"have {node.get_name()} read {where} while it does not hold what the graph reads there")
        for where in sorted(overwritten):
            if written_in[node.get_name(), where] != turns[where]:
                _refuse(f"have {node.get_name()} write {where} while it holds something else than in the graph")
            _begin_turns(turns, where, operator, others)


def _begin_turns(turns: Counter[str], where: str, operator: str, others: Mapping[str, Sequence[str]]) -> None:
    """Counts the turns that a write to ``where`` begins."""
    turns[where] += _writes_all(operator)
    turns.update(others.get(where, ()))


def _check_loop(parts: Sequence[Any], memory: dict[str, str]) -> None:
    """Of what is fused into one kernel: no part writes what it, or an earlier one, reads in another iteration."""
    for place, writer in enumerate(parts):
        written = dict(_written(writer, memory))
        for write in writer.read_writes.writes:
            if (where := written.get(write.name)) is None:
                continue
            reads = [read for part in parts[:place] for read in _reads_of(part, where, memory)]
            # Its own reads without a place are of an order, or a library call's.
            reads += [read for read in _reads_of(writer, where, memory) if isinstance(read, MemoryDep)]
            if not all(_in_one_loop(read, write) for read in reads):
                _refuse(f"have one kernel read and write {where} in another order than the graph's")


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"Inductor would {what}, and compute something else. Compile with options={{'lowering': 'eager'}}, and please "
        "report the model"
    )


def _written(node: Any, memory: dict[str, str]) -> Iterator[tuple[str, str]]:
    """What a node writes in memory that there was: the name that it has from then on, and the memory's own."""
    for output in node.get_outputs():
        for name in output.get_mutations():
            yield output.get_name(), memory.get(name, name)


def _our_operator(node: Any) -> str:
    """The name of the operator of ours that a node calls; empty for other nodes."""
    operator = getattr(node.node, "op_overload", None)
    return operator._opname if isinstance(operator, OpOverload) and operator.namespace == "vescale" else ""


def _writes_all(operator: str) -> bool:
    return operator not in ("", "matmul_into", "embedding_into")
