"""A compiled graph at run time: sharded parameters in, flat shards to the code, results out."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis

from .capture import Capture, CapturedUnit, given_bytes
from .passes.context import GraphError, Part
from .quantities import size_text
from .runtime.agreement import agree_on_buffers, agree_on_graph, tell_of_failure
from .runtime.boundary import binding_of, flat_input
from .runtime.dbuffer import DBuffer
from .runtime.life import life
from .runtime.messages import tell_apart
from .runtime.model import Forward, kept_beside
from .runtime.used import add_graph
from .torch_internals.autograd import saves_elsewhere

_log = logging.getLogger(__name__)


class CompiledGraph:
    """Its :meth:`call` is what Dynamo calls in place of the captured graph, with the same arguments.

    The units that were there at capture play no part: Dynamo runs one graph for every layer, and every model,
    that looks like the one it captured. The units come from the arguments at each call.
    """

    def __init__(
        self, captured: Capture, run: Callable[..., Any], deadline: float, patience: float, spare: int | None
    ) -> None:
        """
        Args:
            deadline: seconds to wait for ranks that have the graph too, if they are there.
            patience: and for those that may compile it only now.
            spare: bytes that a memory budget leaves for what other forwards keep; None without a budget.
        """
        self._units = captured.units
        self._gradients = captured.context.gradients
        # Of a forward that turns gradients on itself, too. Dynamo guards the mode outside.
        self._records = any(unit.graph.shard.requires_grad for unit in captured.units)
        self._with_gradient = tuple(
            {unit.indices[view] for view in self._gradients.get(ordinal, ())}
            for ordinal, unit in enumerate(captured.units)
        )
        self._alike = _alike(captured)
        self._take_down()
        self._others = captured.others
        forward = captured.context.summaries.get(Part.FORWARD)
        self._left = forward.left_bytes if forward is not None else 0
        self._run = run
        self._deadline = deadline
        self._patience = patience
        self._spare = spare

    def call(self, *args: Any) -> Any:
        buffers = [_buffer_like_captured(unit, args) for unit in self._units]
        if not all(buffer.agreed for buffer in buffers):
            agree_on_buffers(buffers, deadline_s=self._patience)
        if self._life is not life():  # with ranks that may compile the graph only now
            agree_on_graph(buffers, self._alike, deadline_s=self._patience)
            self._take_down()
        # By names: layers that share the graph are told apart, and what ranks call their groups plays no part.
        number = zlib.crc32("".join(buffer.name for buffer in buffers).encode())
        for group in dict.fromkeys(buffer.group for buffer in buffers):
            tell_apart(group, number)
        forward = Forward(0 if saves_elsewhere() else self._left, buffers, compiled=True)
        self._check_budget(forward, args)
        with torch.set_grad_enabled(self._records):
            flats = self._flat_inputs(buffers, args, forward)
        return self._run(*flats, *(args[position] for position in self._others))

    def _flat_inputs(self, buffers: Sequence[DBuffer], args: Sequence[Any], forward: Forward) -> list[Any]:
        flats: list[Any] = []
        for unit, buffer, used in zip(self._units, buffers, self._with_gradient, strict=True):
            buffer.deadline = self._deadline
            params = [args[position] for position in unit.positions]
            flats.append(flat_input(buffer, params, used=used, forward=forward))
            if unit.graph.reductions is not None:
                flats.append(buffer.reductions_handle)
        return flats

    def _take_down(self) -> None:
        """Which gradients the graph computes, and what was frozen: all ranks have agreed on it."""
        self._life = life()
        for ordinal in self._gradients:
            unit = self._units[ordinal]
            views = zip(unit.indices, unit.graph.views, strict=True)
            frozen = {index for index, view in views if not view.trainable}
            add_graph(unit.layout, frozen, self._with_gradient[ordinal])

    def _check_budget(self, forward: Forward, args: Sequence[Any]) -> None:
        """Warns, once, if other forwards keep more than the memory budget leaves: known only now that they have run."""
        if self._spare is None or (kept := kept_beside(forward) - given_bytes(args)) <= self._spare:
            return
        _log.warning(
            "[rank %s] backend='vescale': this step exceeds memory_budget. The budget leaves %s beside what the graph "
            "of %s takes, and the forwards before it keep %s for their backwards. They are of graph breaks, of layers "
            "compiled one by one, or of several calls. Compile the model as one graph, run backwards sooner, use "
            "activation checkpointing, or give more.",
            forward.buffers[0].rank,
            size_text(max(self._spare, 0)),
            forward.buffers[0].name,
            size_text(kept),
        )
        self._spare = None


def _buffer_like_captured(unit: CapturedUnit, args: Sequence[Any]) -> DBuffer:
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


@contextlib.contextmanager
def others_hear_of_failures(buffers: Sequence[DBuffer]) -> Iterator[None]:
    """A rank that fails to compile says why in place of its collectives: the others do not wait for it in vain.

    Where PyTorch asks to begin again, maybe on this rank only, nothing has failed.
    """
    try:
        yield
    except RestartAnalysis:
        raise
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the rank that has the store may have gone
            tell_of_failure(buffers, error)
        raise


def check_agreement(captured: Capture, deadline: float) -> None:
    """Compares the compiled graph's options and collectives with the other ranks', for ``deadline`` seconds at most.

    Raises:
        RanksDisagree, RanksMissing: the others are not about to do the same.
    """
    agree_on_graph(captured.buffers, _alike(captured), deadline_s=deadline)


def _alike(captured: Capture) -> list[str]:
    """What ranks compare: the options that schedules depend on, and the collectives."""
    context = captured.context
    lines = [f"{part.value}: {line}" for part, lines in context.collectives.items() for line in lines]
    return [f"options: {context.options}", *lines]
