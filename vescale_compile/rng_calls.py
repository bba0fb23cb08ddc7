"""Operators that are called through another one, which saves or restores the state of random numbers for them.

Where a checkpointed region runs again, PyTorch's partitioner has what may draw random numbers (attention, which may
drop out) draw the same ones. What stands in the graph then has no schema and no example value.
"""

from __future__ import annotations

from typing import Any, cast

from torch import fx
from torch._ops import OpOverload

from .torch_internals.aot import RESTORES_RNG_STATE, RESTORES_RNG_STATE_IN_PLACE, SAVES_RNG_STATE
from .torch_internals.tracing import fake_mode_of


def give_values(graph: fx.Graph) -> None:
    """Gives such nodes the example values that they lack."""
    for node in graph.nodes:
        if "val" not in node.meta and (plain := plain_node(node)) is not None:
            with fake_mode_of(graph):
                value = cast(OpOverload, plain.target)(*example_values(plain.args), **example_values(plain.kwargs))
            if node.target is SAVES_RNG_STATE:
                (state,) = (user.meta["val"] for user in node.users if user.args[1] == 0)
                value = (state, value)
            node.meta["val"] = value


def plain_node(node: fx.Node) -> fx.Node | None:
    """A node that makes the call which ``node`` makes through another operator by itself, on inputs of the same example
    values, in a graph of its own; None if it makes none."""
    if node.target not in (RESTORES_RNG_STATE, SAVES_RNG_STATE, RESTORES_RNG_STATE_IN_PLACE):
        return None
    given: tuple[Any, ...] = node.args
    target, *operands = given[1:] if node.target is RESTORES_RNG_STATE else given  # whose first argument is the state
    options = {name: value for name, value in node.kwargs.items() if name != "rng_state"}
    graph = fx.Graph()

    def stand_in(source: fx.Node) -> fx.Node:
        placeholder = graph.placeholder(source.name)
        placeholder.meta["val"] = source.meta.get("val")
        return placeholder

    args, kwargs = fx.node.map_arg((tuple(operands), options), stand_in)
    plain = graph.call_function(target, args, kwargs)
    if "val" in node.meta:
        plain.meta["val"] = node.meta["val"][1] if node.target is SAVES_RNG_STATE else node.meta["val"]
    return plain


def example_values(args: Any) -> Any:
    """A node's arguments, with the nodes among them replaced by their example values."""
    return fx.node.map_arg(args, lambda node: node.meta["val"])
