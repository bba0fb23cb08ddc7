"""Which of their arguments operators write to or return, as their schemas say."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import getitem

import torch
from torch import fx
from torch._ops import OpOverload


def written_by(node: fx.Node) -> list[fx.Node]:
    """Arguments that the node's operator writes to."""
    if not isinstance(node.target, OpOverload) or not _writes(node.target):
        return []
    return [arg for arg, written in aliasing_arguments(node, node.target) if written]


def aliasing_arguments(node: fx.Node, operator: OpOverload) -> Iterator[tuple[fx.Node, bool]]:
    """Of a node that calls an operator: arguments that its schema marks as aliased, and whether it writes to them."""
    for position, name, written in aliased(operator):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, fx.Node):
                yield each, written


# At run time they are views of their first argument; their schemas don't say so.
_UNDECLARED_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)


def is_view(node: fx.Node) -> bool:
    """Whether the node only gives another shape to memory it does not read."""
    if not isinstance(node.target, OpOverload):
        return node.target is getitem
    return _returns_an_argument(node.target) and not _writes(node.target)


def viewed(node: fx.Node) -> fx.Node | None:
    """The argument that the node's result is a view of, or is."""
    if node.target is getitem:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    if not isinstance(node.target, OpOverload) or not _returns_an_argument(node.target):
        return None
    if node.target in _UNDECLARED_VIEWS:
        return node.all_input_nodes[0]
    return next((arg for arg, _ in aliasing_arguments(node, node.target)), None)


# Namespaces of the program's own collectives and their waits.
_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd"})


def is_functional_collective(target: object) -> bool:
    """Whether an operator is one of ``torch.distributed._functional_collectives``: a collective, or its wait."""
    return isinstance(target, OpOverload) and target.namespace in _COLLECTIVES


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node's result, or write to it, seen through views."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


def is_of_python(target: object) -> bool:
    """Whether what a node calls is Python's own: it takes a tuple apart, or computes sizes, and reads no memory."""
    return not isinstance(target, torch._ops.OperatorBase)


def is_pointwise(target: object) -> bool:
    """Whether each element of an operator's result depends on the same of its operands alone."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


# Schemas are built anew whenever they are asked for, and passes ask of every node many times.
@functools.cache
def _returns_an_argument(target: OpOverload) -> bool:
    """Whether the operator's first result is an argument, or a view of one."""
    returns = target._schema.returns
    return target in _UNDECLARED_VIEWS or (bool(returns) and returns[0].alias_info is not None)


@functools.cache
def _writes(target: OpOverload) -> bool:
    """Whether the operator writes to an argument."""
    return any(written for _, _, written in aliased(target))


@functools.cache
def has_results(target: OpOverload) -> bool:
    """Whether the operator returns anything; launches and waits don't."""
    return bool(target._schema.returns)


@functools.cache
def aliased(target: OpOverload) -> tuple[tuple[int, str, bool], ...]:
    """Arguments that the schema marks as aliased: position, name, and whether the operator writes to it."""
    return tuple(
        (position, argument.name, argument.alias_info.is_write)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None
    )
