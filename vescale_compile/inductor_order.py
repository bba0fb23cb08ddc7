"""How Inductor is made to keep the order of nodes. Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.

Inductor's own scheduling of collectives pins a node behind others with the operator ``control_deps``; there is no
public way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet

from . import inductor_reads, torch_internals
from .schemas import written_by

_OPERATIONS = "vescale_operations"


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
        return get_hash_for_files(
            (*passes, torch_internals.__file__, inductor_reads.__file__, __file__), extra=type(self).__qualname__
        )


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
