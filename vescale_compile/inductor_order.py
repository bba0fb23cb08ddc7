"""How Inductor is made to keep the order of nodes, and held to it. Private names of PyTorch, tried on torch 2.11.0 to
2.13.0.

Inductor's own scheduling of collectives pins a node behind others with the operator ``control_deps``; there is no
public way. What kernels then read, and when, only the scheduler's nodes say: kernels compute values anew where they use
them, and are fused.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import custom_graph_pass, ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.dependencies import WeakDep  # of an order alone
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from . import torch_internals
from .schemas import written_by

_OPERATIONS = "vescale_operations"
_LAUNCHES = ("start_", "carry_")  # begin the names of our operators that return while what they write is in flight


class KeptOrder(CustomGraphPass):
    """The last pass on a graph that Inductor lowers: has the scheduler keep the order of some of its nodes.

    ``pairs`` gives nodes, each with one that must come after it. A node without a result that another must follow has
    to follow one itself: Inductor knows the operations of nodes like it from their pins.

    Raises:
        ValueError: the user has set a pass in the same place, which would not run.
    """

    def __init__(self, pairs: Callable[[fx.Graph], list[tuple[fx.Node, fx.Node]]]) -> None:
        if torch._inductor.config.post_grad_custom_post_pass is not None:
            raise ValueError(
                "backend='vescale' needs torch._inductor.config.post_grad_custom_post_pass for itself, and your pass "
                "would not run: set it as post_grad_custom_pre_pass, or leave it out"
            )
        self._pairs = pairs

    def __call__(self, graph: fx.Graph) -> None:
        earlier: dict[fx.Node, OrderedSet[fx.Node]] = {}
        for before, after in self._pairs(graph):
            earlier.setdefault(after, OrderedSet()).add(before)
        preserve_node_ordering(graph, earlier)

    def uuid(self) -> bytes:
        """Part of Inductor's cache key: code that was generated under another version's order must not be found.

        The order rests on all that passes know of a graph.
        """
        passes = sorted(map(str, Path(inspect.getfile(self._pairs)).parent.glob("*.py")))
        return get_hash_for_files((*passes, torch_internals.__file__, __file__), extra=type(self).__qualname__)


class CheckedReads(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]  # of 2.13
    """Runs on the fused nodes, in the order in which their code is generated.

    A turn of a piece of memory begins with each operator of ours that writes it as a whole: a launch, a wait. A read
    names the write that it wants to see: it must come in that turn, and, but for our own operators, not while a
    collective is in flight there.

    Raises:
        RuntimeError: the code would compute with other parameters or gradients than the graph does.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if nodes:
            _check_reads([part for node in nodes for part in node.get_nodes()], nodes[0].scheduler.mutation_real_name)
        return nodes

    def uuid(self) -> bytes:
        """Part of Inductor's cache key: what another version has let pass is not found."""
        return get_hash_for_files((__file__,))


def _check_reads(nodes: Sequence[Any], memory: dict[str, str]) -> None:
    places = {operation.get_operation_name(): place for place, operation in enumerate(V.graph.operations)}
    turns, turn_of, in_flight = Counter[str](), dict[str, int](), set[str]()
    for node in sorted(nodes, key=lambda node: places[node.get_name()]):
        operator = _our_operator(node)
        for written, where in _written(node, memory):
            turns[where] += _writes_all(operator)
            turn_of[written] = turns[where]
            if operator.startswith(_LAUNCHES):
                in_flight.add(written)
    turns.clear()
    for node in nodes:
        operator = _our_operator(node)
        overwritten = {where for _, where in _written(node, memory)}  # what a quantized reduction has read, say
        for read in sorted({each.name for each in node.read_writes.reads if not isinstance(each, WeakDep)}):
            where = memory.get(read, read)
            too_early = read in in_flight and not operator and where not in overwritten
            if too_early or turn_of.get(read, 0) != turns[where]:
                raise RuntimeError(
                    f"Inductor would have {node.get_name()} read {where} while it does not hold what the graph reads "
                    "there, and compute something else. Compile with options={'lowering': 'eager'}, and please report "
                    "the model"
                )
        if _writes_all(operator):
            turns.update(where for _, where in _written(node, memory))


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


def lower_pinned(before: Sequence[Any], pinned: Any, *args: Any) -> Any:
    """Lowers ``control_deps(before, pinned, *args)`` with the arguments of a library's operator computed first, and all
    that was to be computed from memory that it writes.

    The pins are of all that is lowered with the node. A kernel of generated code that computes an argument would be
    among that, and could not be fused with others before the pins. What reads written memory, Inductor itself has
    computed no later than there, but behind the operator.
    """
    graph = pinned.graph_module.graph
    if not any(torch_internals.generates_code_for(node.target) for node in graph.nodes):
        for argument in args:
            if isinstance(argument, ir.TensorBox):
                argument.realize()
    given = dict(zip(graph.find_nodes(op="placeholder"), args, strict=False))
    for written in (each for node in graph.nodes for each in written_by(node)):
        V.graph.mark_buffer_mutated(given[written].get_name())
    return _lower_control_deps(before, pinned, *args)


def lower_before_2_13(before: Sequence[Any], pinned: Any, *args: Any) -> Any:
    """Lowers ``control_deps(before, pinned, *args)``, whether or not the nodes have results.

    Before 2.13, Inductor's own lowering fails on a pinned node that has none, as launches and waits (2.11), or
    leaves out the pins behind such a node (2.12).
    """
    graph: GraphLowering = V.graph
    names: list[str] = []
    for leaf in pytree.tree_leaves(before):
        if isinstance(leaf, ir.IRNode):
            leaf.realize()
            names.append(leaf.get_name())
    for node in pytree.tree_leaves(graph.current_node.args[0]):  # a node that was decomposed has left what it returned
        if isinstance(node, fx.Node):
            names += node.meta.get(_OPERATIONS, ())
    known = len(graph.operations)
    result = _lower_nodes(pinned.graph_module.graph, args)
    added = graph.operations[known:]
    for operation in added:
        graph.additional_buffer_deps[operation.get_operation_name()].update(names)
    graph.current_node.meta[_OPERATIONS] = [
        op.get_name() for op in added if isinstance(op, ir.Buffer) and isinstance(op.layout, ir.NoneLayout)
    ]
    return result


def _lower_nodes(graph: fx.Graph, args: Sequence[Any]) -> Any:
    """Lowers a pinned node, which is a graph of its own, into the graph that Inductor is lowering."""
    whole: GraphLowering = V.graph
    outer = whole.current_node
    inputs = iter(args)
    for node in graph.nodes:
        if node.op == "placeholder":
            whole.env[node] = next(inputs)
        elif node.op == "output":
            return whole.fetch_args_kwargs_from_env(node)[0][0]
        else:
            whole.current_node = node
            whole.env[node] = whole.run_node(node)
            whole.current_node = outer
    raise AssertionError("a graph without an output")


_IS_OLD = torch.__version__.split(".")[:2] in (["2", "11"], ["2", "12"])
_lower_control_deps = lower_before_2_13 if _IS_OLD else lowerings[control_deps]
lowerings[control_deps] = lower_pinned
