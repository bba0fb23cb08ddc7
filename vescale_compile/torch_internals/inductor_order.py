"""How Inductor is made to keep the order of nodes. Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.

Inductor's scheduler takes the operations that must come first by name; there is no public way to give it any. Its own
scheduling of collectives does so with the operator ``control_deps``, which makes a graph of its own of each node that
waits: slow to trace and to lower, and in 2.11 and 2.12 wrong for nodes without a result, as launches and waits are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard
from unittest import mock

from torch import fx
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch.utils import _pytree as pytree

from ..schemas import written_by
from .inductor_graphs import generates_code_for

_ORDER = "_vescale_order"  # of a GraphLowering


@contextmanager
def order_kept(pairs: Callable[[fx.Graph], list[tuple[fx.Node, fx.Node]]]) -> Iterator[None]:
    """Has Inductor's scheduler keep the order of some nodes of each graph.

    Args:
        pairs: gives nodes of a graph that is about to be lowered, each with one that must come after it.
    """

    def run(lowering: GraphLowering, *args: Any) -> Any:
        vars(lowering)[_ORDER] = _Order(pairs(lowering.graph))
        return _run(lowering, *args)

    with mock.patch.object(GraphLowering, "run", run), mock.patch.object(GraphLowering, "run_node", _run_node):
        yield


class _Lowered(NamedTuple):
    """What became of a node."""

    result: Any
    without_result: list[str]  # operations, by name

    def names(self) -> Iterator[str]:
        """Of what an operation that comes later waits for."""
        for leaf in pytree.tree_leaves(self.result):
            if isinstance(leaf, ir.IRNode):
                leaf.realize()
                yield leaf.get_name()
        yield from self.without_result


class _Order:
    """Of the nodes of one graph, those that come before, and what became of them."""

    def __init__(self, pairs: list[tuple[fx.Node, fx.Node]]) -> None:
        self.before: dict[fx.Node, list[fx.Node]] = {}
        self.lowered: dict[fx.Node, _Lowered] = {}
        for before, after in pairs:
            self.before.setdefault(before, [])
            self.before.setdefault(after, []).append(before)


def _run_node(lowering: GraphLowering, node: fx.Node) -> Any:
    """Lowers a node; the operations that this takes wait for those of the nodes that come before."""
    order: _Order | None = vars(lowering).get(_ORDER)
    if order is None or node not in order.before:
        return _lower(lowering, node)
    names = [name for before in order.before[node] for name in order.lowered[before].names()]
    _store_inputs(lowering, node)
    known = len(lowering.operations)
    result = _lower(lowering, node)
    added = lowering.operations[known:]
    for operation in added:
        lowering.additional_buffer_deps[operation.get_operation_name()].update(names)
    order.lowered[node] = _Lowered(result, [op.get_name() for op in added if _is_void(op)])
    return result


def _store_inputs(lowering: GraphLowering, node: fx.Node) -> None:
    """Has the arguments of a library's operator computed first, and all that is to be computed from memory that it
    writes.

    A kernel of generated code that computes an argument would else be among what waits, and could not be fused with
    others before. What reads written memory, Inductor itself has computed no later than there, but behind the operator.
    """
    written_to = written_by(node)
    for argument in written_to if generates_code_for(node.target) else node.all_input_nodes:
        if isinstance(box := lowering.env[argument], ir.TensorBox):
            box.realize()
    for written in written_to:
        lowering.mark_buffer_mutated(lowering.env[written].get_name())


def _is_void(operation: ir.Operation) -> TypeGuard[ir.Buffer]:
    """Whether nothing can name what an operation returns."""
    if not isinstance(operation, ir.Buffer) or operation.name is None:
        return False
    return isinstance(operation.layout, ir.NoneLayout)


_run, _lower = GraphLowering.run, GraphLowering.run_node
