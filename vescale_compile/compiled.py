"""A compiled graph at run time: sharded parameters in, flat shards to the code, results out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .capture import Capture, CapturedUnit
from .passes.context import CompileContext, GraphError
from .runtime.agreement import agree_first
from .runtime.boundary import binding_of, flat_input
from .runtime.buffer import FlatBuffer


class CompiledGraph:
    """Its :meth:`call` is what Dynamo calls in place of the captured graph, with the same arguments.

    The units that were there at capture play no part: Dynamo runs one graph for every layer, and every model,
    that looks like the one it captured. The units come from the arguments at each call.
    """

    def __init__(self, captured: Capture, run: Callable[..., Any]) -> None:
        self._units = captured.units
        self._with_gradient = tuple(
            {unit.indices[view] for view in captured.context.gradients.get(ordinal, ())}
            for ordinal, unit in enumerate(captured.units)
        )
        self._others = captured.others
        self._run = run

    def call(self, *args: Any) -> Any:
        flats: list[Any] = []
        for unit, used in zip(self._units, self._with_gradient, strict=True):
            buffer = _buffer_like_captured(unit, args)
            params = [args[position] for position in unit.positions]
            flat = flat_input(buffer, params, reduced=unit.graph.port is None, used=used)
            flats.extend([flat] if unit.graph.port is None else [buffer.shard, flat])
        return self._run(*flats, *(args[position] for position in self._others))


def _buffer_like_captured(unit: CapturedUnit, args: Sequence[Any]) -> FlatBuffer:
    """The one buffer that all of the unit's arguments are in, at the places they had at capture.

    Dynamo's guards see to it: each parameter's place is a value that module code reads, and which parameters
    share a buffer object another. A breach would compute with wrong weights, so it is checked at each call.
    """
    buffer = args[unit.positions[0]]._vescale_binding.buffer
    slots = zip(unit.positions, unit.indices, strict=True)
    if buffer.layout != unit.layout or any(binding_of(args[i]) != (buffer, slot) for i, slot in slots):
        raise GraphError(
            f"[rank {buffer.rank}] a graph compiled for unit {unit.graph.name} was called with parameters of unit "
            f"{buffer.name}, which is laid out otherwise. This is a bug in guards: call torch._dynamo.reset()"
        )
    return buffer


def check_agreement(captured: Capture, deadline: float) -> None:
    """Compares units and collectives with the other ranks, the first time that these parameters are compiled.

    Later compilations of the same parameters (for another batch size, say) may happen on one rank alone: they
    are compared with the first one on this rank, which the others have seen.
    """
    for group in dict.fromkeys(unit.buffer.group for unit in captured.units):
        units = [unit for unit in captured.units if unit.buffer.group is group]
        lines = [line for unit in units for line in unit.describe()]
        lines += _collective_lines(captured.context)
        agree_first([unit.buffer for unit in units], "compiled graph", lines, deadline_s=deadline)


def _collective_lines(context: CompileContext) -> list[str]:
    return [f"{part.value}: {line}" for part, lines in context.collectives.items() for line in lines]
