"""Keeps parameters for the backward where memory allows it (selective resharding).

``reshard_after_forward=True`` lets a unit's memory go where it is short. The joint graph has been cut with everything
resharded, which shows what the step needs and what each unit would take for how long. Of what is kept the forward hands
over what it has gathered, where it handed over the shard.

Given a memory budget, as many are kept as fit and pay, in the order of the time that they save for the memory they
hold. What the last of them takes could also be used to launch further ahead, so the schedules of a few numbers of units
are compared. Of those that are equally fast the one with the fewest gathers is taken that leaves room to gather a unit
ahead; if none does, the one that leaves most. Without a budget one may be kept, of the last graph of a step: the unit
that the backward reads first, a language model's head, say, if what gathering one unit ahead takes has room for it.

Of the units that the backward does gather again, the first is needed as soon as it begins. If there is room for it,
and no other graph runs in between, its gather is launched while the forward ends, and carried over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, cast

from torch import fx

from ..rng_calls import give_values
from ..schedule import find_schedule, least_peak
from ..torch_internals.aot import Halves
from .agreed import agreed_units
from .aliases import bases_of
from .context import CompileContext
from .moves import uncast
from .overlap import room_ahead
from .reshard import GATHERS, casts_before
from .step import Step, survey

_EQUAL = 1.001  # times that differ by less are the same to a cost model


def retain(halves: Halves, context: CompileContext) -> None:
    """Decides what is kept and what is carried over, and has the forward hand it over.

    Args:
        halves: the forward and the backward, cut with all units resharded that may be.
        context: ``kept``, ``carried``, ``saved``, ``donated`` and ``needs`` are set.
    """
    for half in halves:
        give_values(half.graph)
    _keep_what_is_never_resharded(halves, context)
    context.donated = _donated(halves[0].graph, context.results)
    context.saved = _saved(halves[0].graph)  # so far those that are never resharded, which the survey counts
    step = survey(halves, context)
    again = frozenset(step.forward.gathered.keys() & step.backward.gathered.keys())
    kept = _to_keep(step, context)
    context.kept, context.carried = agreed_units(again, kept, _to_carry(step, kept, context), context)
    hand_over(halves, context.kept, context.results)
    context.needs = step.needs(context.kept, context.carried)
    context.saved = _saved(halves[0].graph)


def _keep_what_is_never_resharded(halves: Halves, context: CompileContext) -> None:
    """With ``torch._functorch.config.activation_memory_budget=0`` the partitioner has the backward compute everything
    again, whatever must be saved: gathers of units that are not resharded, too."""
    twice = _gathers(halves[0]).keys() & _gathers(halves[1]).keys()
    if again := frozenset(unit for unit in twice if not context.reshards(unit)):
        hand_over(halves, again, context.results)


def hand_over(halves: Halves, units: frozenset[int], results: int) -> None:
    """Has a forward hand over the parameters of ``units`` that it has gathered, and its backward take them where it
    gathered them again.

    Args:
        halves: cut with the units resharded.
        units: by ordinal; both halves gather them.
        results: how many of the forward's outputs are the program's own.
    """
    forward, backward = halves
    first, again = _gathers(forward), _gathers(backward)
    output = forward.graph.output_node()
    outputs = list(cast(Sequence[Any], output.args[0]))
    places = {str(value): place for place, value in enumerate(outputs) if place >= results}
    for unit in sorted(units):
        outputs[places[_become_input(again[unit])]] = first[unit]
    output.args = (tuple(outputs),)
    for half in halves:
        half.recompile()


def _gathers(half: fx.GraphModule) -> dict[int, fx.Node]:
    """By unit."""
    return {cast(int, node.args[1]): node for node in half.graph.nodes if node.target in GATHERS}


def _become_input(gather: fx.Node) -> str:
    """Makes a gather of the backward an input, in the place of the shard that it gathers, whose name is returned."""
    between, shard = casts_before(gather), uncast(cast(fx.Node, gather.args[0]))
    shard.append(gather)
    gather.op, gather.target, gather.args, gather.kwargs = "placeholder", gather.name, (), {}
    gather.meta = {**shard.meta, "val": gather.meta["val"]}
    for unused in (*between, shard):
        gather.graph.erase_node(unused)
    return shard.name


def _saved(forward: fx.Graph) -> dict[str, int]:
    """Units by the names of the parameters that a forward hands to its backward."""
    bases = bases_of(forward)
    values = forward.output_node().all_input_nodes
    return {value.name: cast(int, bases[value].args[1]) for value in values if bases[value].target in GATHERS}


def _donated(forward: fx.Graph, results: int) -> frozenset[str]:
    """Names of what a forward keeps for its backward alone: no input of its own, no result, and no part of either; nor
    of what it has gathered, which is there as a whole."""
    bases = bases_of(forward)
    outputs = cast(Sequence[Any], forward.output_node().args[0])
    given = {bases[value] for value in outputs[:results] if isinstance(value, fx.Node)}
    saved = [value for value in outputs[results:] if isinstance(value, fx.Node) and bases[value] not in given]
    return frozenset(
        value.name for value in saved if bases[value].op != "placeholder" and bases[value].target not in GATHERS
    )


def _to_keep(step: Step, context: CompileContext) -> frozenset[int]:
    """The units whose parameters the forward hands over to the backward."""
    if context.spare is not None:
        return frozenset(_worth_keeping(step, context.spare))
    first = step.first_gathered_again()
    # One that the program returns may be written to before the backward.
    if first not in step.gathered_again or context.memory_budget is not None or not context.beside.last:
        return frozenset()
    kept = frozenset([first])
    return kept if step.planned(kept) <= max(step.allowances().values()) else frozenset()


def _to_carry(step: Step, kept: frozenset[int], context: CompileContext) -> frozenset[int]:
    """The units whose gather for the backward is launched in the forward."""
    first = step.first_gathered_again(kept)
    if first is None or not context.beside.followed:
        return frozenset()
    carried = frozenset([first])
    room = context.room(max(step.allowances(kept).values()), step.standing + step.peak(kept))
    return carried if step.planned(kept, carried) <= room else frozenset()


def _worth_keeping(step: Step, budget: int) -> Sequence[int]:
    """The units to keep, by ordinal, the one that is worth most first."""
    order = step.gathered_again
    # As if a step took more with each. How slots fill may say otherwise, and then fewer are kept than would fit.
    most = bisect_right(range(1, len(order) + 1), budget, key=lambda count: step.planned(frozenset(order[:count])))
    counts = sorted({max(most - less, 0) for less in (0, *(1 << power for power in range(len(order).bit_length())))})
    seconds = {count: _seconds(step, frozenset(order[:count]), budget) for count in counts} if most else {0: 0.0}
    fast = [count for count in seconds if seconds[count] <= min(seconds.values()) * _EQUAL]
    roomy = [count for count in fast if _planned_ahead(step, frozenset(order[:count])) <= budget]
    return order[: max(roomy) if roomy else min(fast)]


def _planned_ahead(step: Step, kept: frozenset[int]) -> int:
    """What a step takes whose graphs can gather and reduce one unit ahead, in bytes. With less a schedule may be as
    fast in theory; but its buffers lie in slots, and free memory between them may be in pieces."""
    return step.planned(kept) + max((room_ahead(tasks) for tasks in step.tasks(kept).values()), default=0)


def _seconds(step: Step, kept: frozenset[int], budget: int) -> float:
    """How long the forward and the backward take if each gets what the budget leaves beyond the least."""
    spare = max(0, budget - step.planned(kept))
    graphs = step.tasks(kept).values()
    return sum(find_schedule(tasks, least_peak(tasks) + spare).timeline.makespan for tasks in graphs)
