"""What :mod:`verify` proves of the ends of communication: the ranks of each collective, and what a graph gives away."""

from __future__ import annotations

from torch import fx

from .context import Comm, CompileContext, Use, buffer_of, comm_of, fail, is_allocation
from .edit import numel_of


def check_ends(graph: fx.Graph, bases: dict[fx.Node, fx.Node], context: CompileContext) -> None:
    for node in graph.nodes:
        if (comm := comm_of(node)) is not None:
            _check_addressed(node, comm, context)
            _check_whole(node, comm, bases, context)
    _check_given(graph.output_node(), bases, context)


def _check_addressed(node: fx.Node, comm: Comm, context: CompileContext) -> None:
    """A launch or a wait names the unit that it is marked with, and that unit's ranks: agreement among ranks rests on
    the marks."""
    unit = context.units[comm.unit]
    wanted = {"unit": comm.unit, "group": unit.comm.group, "replicas": unit.comm.replicas}
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if value != wanted.get(argument.name, value):
            found = f"{argument.name} {value!r}, not {wanted[argument.name]!r}"
            fail(context, node, f"a collective marked as of unit {unit.name} is of {found}")


def _check_whole(node: fx.Node, comm: Comm, bases: dict[fx.Node, fx.Node], context: CompileContext) -> None:
    """What is gathered and what is reduced is a whole unit."""
    unit = context.units[comm.unit]
    for buffer in (bases[arg] for arg in node.all_input_nodes):
        mark = buffer_of(buffer)
        if mark is not None and mark.use in (Use.PARAMETERS, Use.GRADIENTS) and numel_of(buffer) != unit.numel:
            held = f"the {context.named(mark)} have {numel_of(buffer)} elements"
            fail(context, node, f"{held}, and the unit has {unit.numel}")


def _check_given(output: fx.Node, bases: dict[fx.Node, fx.Node], context: CompileContext) -> None:
    """Nothing that outlives the graph lies in a slot, which the next graph writes to."""
    for buffer in (bases[value] for value in output.all_input_nodes):
        mark = buffer_of(buffer)
        if mark is not None and not is_allocation(buffer):
            fail(context, output, f"the {context.named(mark)} are returned from a slot, which others lie in later")
