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
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.utils._ordered_set import OrderedSet

_LAUNCHES = ("start_", "carry_")  # begin the names of our operators that return while what they write is in flight


@contextmanager
def reads_known_by_their_writes() -> Iterator[None]:
    """Has Inductor heed what a read waits for where memory, as a slot, was written before.

    Such a read goes by the name of that write. Where the scheduler gives a node other loops it forgets it, and then
    moves the read before what it waits for.

    Besides, a fusion of loops may keep one row of what its loops hand each other, where an iteration computes several.
    """
    with (
        mock.patch.object(OuterLoopFusedSchedulerNode, "check_outer_fusion_loop_level_attr", _may_share_outer_loops),
        mock.patch.object(SchedulerNode, "recompute_size_and_body", _recompute_size_and_body),
    ):
        yield


def _recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
    """Gives a node other loops; what it waits for stays as it was."""
    order = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, WeakDep | StarDep))
    _recompute(node, *args, **kwargs)
    node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))


def _may_share_outer_loops(node: Any, kernels: Sequence[Any], depth: int) -> bool:
    """Whether the loops of several kernels become one, with theirs inside; else each keeps its own.

    What one hands the next is kept for one iteration of the outer loops (PyTorch issue 185702).
    """
    context = V.local_buffer_context
    keeps_one = isinstance(context, LocalBufferContext) and context.local_buffers
    if keeps_one and any(loop.steps != 1 for kernel in kernels for loop in kernel.loop_nest.loops[:depth]):
        return False
    return bool(_share_outer_loops(node, kernels, depth))


_share_outer_loops = OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
_recompute = SchedulerNode.recompute_size_and_body


class CheckedReads(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]  # of 2.13
    """Runs on the fused nodes, in the order in which their code is generated.

    A turn of a piece of memory begins with each operator of ours that writes it as a whole: a launch, a wait; and with
    each write to another that has some of its bytes. A read names the write that it wants to see: it must come in that
    turn, and, but for our own operators, not before or while a collective is in flight there. A write comes in the turn
    in which the graph has it.

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
        return nodes

    def uuid(self) -> str:
        """Part of Inductor's cache key, in which each graph has this package's version besides."""
        return type(self).__qualname__


def _check_turns(nodes: Sequence[Any], memory: dict[str, str], others: Mapping[str, Sequence[str]]) -> None:
    places = {operation.get_operation_name(): place for place, operation in enumerate(V.graph.operations)}
    turns, turn_of, in_flight = Counter[str](), dict[str, int](), set[str]()
    written_in: dict[tuple[str, str], int] = {}  # by node and memory: the turn before it writes there
    arriving = set[str]()  # memory that collectives write
    for node in sorted(nodes, key=lambda node: places[node.get_name()]):
        operator = _our_operator(node)
        for written, where in _written(node, memory):
            written_in[node.get_name(), where] = turns[where]
            _begin_turns(turns, where, operator, others)
            turn_of[written] = turns[where]
            if operator.startswith(_LAUNCHES):
                in_flight.add(written)
                arriving.add(where)
    turns.clear()
    for node in nodes:
        operator = _our_operator(node)
        overwritten = {where for _, where in _written(node, memory)}  # what a quantized reduction has read, say
        reads = {each.name for each in node.read_writes.reads if not isinstance(each, WeakDep)}  # those are of an order
        for read in sorted(node.mutation_renames.get(name, name) for name in reads):
            where = memory.get(read, read)
            unwritten = where in arriving and read not in turn_of
            too_early = (unwritten or read in in_flight) and not operator
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
