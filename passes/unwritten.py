"""Refuses writes to gathered parameters, which are copies: they would be lost without a word.

Dynamo ran the program on fake tensors, regions of it too, and a write to one, through whatever view, shows in its
version. Of two kinds of operators it does not: those that are given lists of tensors, and a library's own, if it
defines no more of one than what it computes. Their schemas say what they write to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from ..schemas import aliasing_arguments
from ..torch_internals.tracing import all_nodes, overload_called
from .context import CompileContext, fail

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"})


def check_unwritten(gm: fx.GraphModule, names: Mapping[fx.Node, str], context: CompileContext) -> None:
    """
    Args:
        gm: Dynamo's graph; those of its regions are looked at, too.
        names: of the parameters, by the nodes that read them.

    Raises:
        GraphError: a parameter is written to.
    """
    memory = names_by_memory(names)
    for node in all_nodes(gm):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value._version > 0 and (place := memory_of(node)) in memory:
            # A parameter that is written to by its own name shows it where it was gathered already.
            _refuse(context, _writer(node.graph, place) or node, memory[place])
        for written in _written_without_trace(node):
            if memory_of(written) in memory:
                _refuse(context, node, memory[memory_of(written)])


def names_by_memory(names: Mapping[fx.Node, str]) -> dict[int | None, str]:
    """Of parameters, given those by the nodes that read them; of memory that is not known there is none."""
    return {place: name for node, name in names.items() if (place := memory_of(node)) is not None}


def memory_of(node: fx.Node) -> int | None:
    """What a node's result lies in, of Dynamo's fake tensors; None where they don't tell."""
    value = node.meta.get("example_value")
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except NotImplementedError:  # inside torch.func.grad and its kin tensors are wrapped
        return None


def _written_without_trace(node: fx.Node) -> Iterator[fx.Node]:
    """Arguments that an operator writes to of which versions may not tell: that is of a library, or private, as those
    that take lists are."""
    operator = node.target if isinstance(node.target, OpOverload) else _overload(node)
    if operator is not None and not _is_public(operator.name()):
        yield from (arg for arg, written in aliasing_arguments(node, operator) if written)


def _overload(node: fx.Node) -> OpOverload | None:
    """Of the operator that a node names, or that the function of PyTorch's which it calls is made of."""
    packet: object = node.target
    if not isinstance(packet, str | OpOverloadPacket):
        packet = getattr(torch.ops.aten, getattr(packet, "__name__", ""), None)
    if not isinstance(packet, OpOverloadPacket) or _is_public(packet._qualified_op_name):
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("example_value"))
    return overload_called(packet, args, kwargs)


def _is_public(operator: str) -> bool:
    return operator.startswith("aten::") and not operator.startswith("aten::_")


def _writer(graph: fx.Graph, memory: int | None) -> fx.Node | None:
    """The first node which by its name writes to what it is given, of this memory."""
    for node in graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs
        if in_place and memory in map(memory_of, node.all_input_nodes):
            return node
    return None


def _refuse(context: CompileContext, node: fx.Node, name: str) -> NoReturn:
    fail(
        context,
        node,
        f"parameter {name!r} is written to inside forward. There it is a gathered copy, and the write would be "
        "lost: write to the sharded parameter outside forward, or keep the value in a buffer (register_buffer)"
        + line_of(node, "it is written"),
    )


def line_of(node: fx.Node, what: str) -> str:
    """For messages: ``what`` is done by the line of the program that a node comes from, as far as Dynamo tells, the
    user's, if one is."""
    frames = re.findall(r'File "(.+)", line (\d+), in', node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not any(map(Path(frame[0]).is_relative_to, _LIBRARIES))] or frames
    return f"; {what} by line {users[-1][1]} of {users[-1][0]}" if users else ""
