"""Cuts the joint graph into forward and backward, and keeps parameters for the backward where memory allows it.

``reshard_after_forward=True`` lets a unit's memory go where it is short. Without a memory budget it always goes. With
one, as many units are kept as fit and pay (selective resharding): the graph is cut with everything resharded, which
shows what the step needs and what each unit would take for how long; then, if any are to be kept, it is cut again.
Units are taken in the order of the time that they save for the memory they hold. What the last of them takes could
also be used to launch further ahead, so the schedules of a few numbers of units are compared. Of those that are equally
fast the one with the fewest gathers is taken that leaves room to gather a unit ahead; if none does, the one that leaves
most.

Of the units that the backward does gather again, the first is needed as soon as it begins. If there is room for it,
its gather is launched while the forward ends, and carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import fx

from ..rng_calls import give_values
from ..schedule import find_schedule, least_peak
from .agreed import agreed_units
from .aliases import bases_of
from .context import CompileContext
from .overlap import room_ahead
from .reshard import GATHERS
from .step import Halves, Step, copied, survey

_EQUAL = 1.001  # times that differ by less are the same to a cost model


def retain(
    gm: fx.GraphModule,
    context: CompileContext,
    mark: Callable[[fx.GraphModule], None],
    cut: Callable[[fx.GraphModule], Halves],
) -> Halves:
    """Cuts a joint graph.

    Args:
        gm: the joint graph.
        context: ``kept``, ``carried``, ``saved`` and ``needs`` are set.
        mark: the passes that say what the backward repeats.
        cut: the partitioner.

    Returns:
        The forward and the backward.
    """
    budget = context.spare

    def cut_keeping(kept: Sequence[int]) -> tuple[Halves, Step]:
        context.kept = frozenset(kept)
        joint = gm if budget is None else copied(gm)
        mark(joint)
        halves = cut(joint)
        for half in halves:
            give_values(half.graph)
        return halves, survey(halves, context)

    halves, step = cut_keeping(())
    again = frozenset(step.forward.gathered.keys() & step.backward.gathered.keys())
    own: Sequence[int] = () if budget is None else _worth_keeping(step, budget)
    while own:
        with_kept, after = cut_keeping(own)
        if budget is None or after.planned() <= budget:
            halves, step = with_kept, after
            break
        own = own[:-1]  # the partitioner saved more than the parameters, a cast of them, say
    context.kept = frozenset(own)
    kept, context.carried = agreed_units(again, context.kept, _to_carry(step, context), context)
    if kept != context.kept:
        halves, step = cut_keeping(sorted(kept))
    context.needs = step.needs(context.carried)
    context.saved = _saved(halves[0].graph)
    return halves


def _saved(forward: fx.Graph) -> dict[str, int]:
    """Units by the names of the parameters that a forward hands to its backward."""
    bases = bases_of(forward)
    values = forward.output_node().all_input_nodes
    return {value.name: cast(int, bases[value].args[1]) for value in values if bases[value].target in GATHERS}


def _to_carry(step: Step, context: CompileContext) -> frozenset[int]:
    """The units whose gather for the backward is launched in the forward."""
    first = step.first_gathered_again
    if first is None:
        return frozenset()
    room = context.room(max(step.allowances.values()))
    return frozenset([first]) if step.planned(carried=frozenset([first])) <= room else frozenset()


def _worth_keeping(step: Step, budget: int) -> Sequence[int]:
    """The units to keep, by ordinal, the one that is worth most first."""
    order = step.gathered_again
    most = next((count for count in range(len(order), 0, -1) if step.planned(frozenset(order[:count])) <= budget), 0)
    counts = sorted({max(most - less, 0) for less in (0, *(1 << power for power in range(len(order).bit_length())))})
    seconds = {count: _seconds(step, frozenset(order[:count]), budget) for count in counts} if most else {0: 0.0}
    fast = [count for count in seconds if seconds[count] <= min(seconds.values()) * _EQUAL]
    roomy = [count for count in fast if _planned_ahead(step, frozenset(order[:count])) <= budget]
    return order[: max(roomy) if roomy else min(fast)]


def _planned_ahead(step: Step, kept: frozenset[int]) -> int:
    """What a step takes whose graphs can gather and reduce one unit ahead, in bytes. With less a schedule may be as
    fast in theory; but its buffers lie in slots, and one unit's is of no use to a larger one."""
    return step.planned(kept) + max((room_ahead(tasks) for tasks in step.tasks(kept).values()), default=0)


def _seconds(step: Step, kept: frozenset[int], budget: int) -> float:
    """How long the forward and the backward take if each gets what the budget leaves beyond the least."""
    spare = max(0, budget - step.planned(kept))
    graphs = step.tasks(kept).values()
    return sum(find_schedule(tasks, least_peak(tasks) + spare).timeline.makespan for tasks in graphs)
