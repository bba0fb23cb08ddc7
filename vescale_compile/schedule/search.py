"""From a task graph to its schedule: what is kept, what is merged, and when all the rest flies.

The list scheduler is run under a few policies; then, while there is a gap to the lower bound, with outputs kept,
with transfers merged, and with its order changed, each as long as it helps. What is found depends on the graph
and the budget alone, so that ranks with equal graphs find the same schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_compile.schedule.bound import lower_bound
from vescale_compile.schedule.budget import check_budget, least_peak
from vescale_compile.schedule.coarsen import CoarseGraph, coarsen
from vescale_compile.schedule.graph import Bytes, TaskGraph
from vescale_compile.schedule.jobs import Group, Grouping, most_frugal, synchronous
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.listing import Frame, list_schedule
from vescale_compile.schedule.machine import Machine
from vescale_compile.schedule.merging import CUTS, mergeable
from vescale_compile.schedule.policies import POLICIES, Policy, in_order
from vescale_compile.schedule.program import Schedule
from vescale_compile.schedule.retention import free_to_keep, keepable
from vescale_compile.schedule.simulate import Timeline, simulate

_UNLIMITED = 1 << 62
_PIECES = 500  # of a step, at the ends of which transfers may be launched
_AHEAD = (1, 2, 3, 5, _UNLIMITED)
_KEPT_TRIALS = 12
_BISECTIONS = 5
_SWAPS = 200
_SMALL = 40  # jobs
_SETTINGS_OF_LARGE = 3
_LIMIT = 1 + 1e-9
_AS_FAST = 0.0005  # of the makespan: what is printed has three digits
_TOLERANCE = 0.01  # of the makespan, given up for memory where there is no budget: it can save gigabytes
_SHARES = (0.5, 0.25, 0.75)  # of spare memory, for the first of two memories


class Setting(NamedTuple):
    """The first memory's share of what is spare, and what the list scheduler is told beside."""

    share: float
    policy: Policy
    ahead: int
    patient: bool


@dataclass(frozen=True)
class Scheduled:
    """A schedule and what it would do."""

    schedule: Schedule
    timeline: Timeline


def find_schedule(graph: TaskGraph, memory_budget: int | None = None) -> Scheduled:
    """Finds a schedule with little exposed communication within a memory budget.

    Args:
        graph: what is to be run.
        memory_budget: bytes that the peak must not exceed. None: as few as allow a makespan within one percent of the
            best one found with no limit.

    Raises:
        BudgetError: no schedule fits; it names the least budget and what takes it.
    """
    coarse = coarsen(graph, _PIECES)
    if memory_budget is None:
        machine = _frugal(coarse.graph, _UNLIMITED, _TOLERANCE, _BISECTIONS)
    else:
        check_budget(graph, memory_budget)
        machine = _Search(coarse.graph, memory_budget, 0.0).best
    return _scheduled(graph, coarse, machine)


def synchronous_schedule(graph: TaskGraph) -> Scheduled:
    """The schedule that overlaps nothing, in which each collective is waited for as soon as it is launched."""
    schedule = Schedule(tuple(most_frugal(graph)[0].instructions))
    return Scheduled(schedule, simulate(graph, schedule))


def lean_schedule(graph: TaskGraph, memory_budget: int) -> Scheduled:
    """One that is as fast as :func:`find_schedule`'s in the same budget, to 0.05 %, in little memory: a search stops at
    the first that is fast enough, whose peak says what it was given rather than what it needs.

    Raises:
        BudgetError: no schedule fits.
    """
    check_budget(graph, memory_budget)
    coarse = coarsen(graph, _PIECES)
    return _scheduled(graph, coarse, _frugal(coarse.graph, memory_budget, _AS_FAST, _BISECTIONS + 1))


def _scheduled(graph: TaskGraph, coarse: CoarseGraph, machine: Machine) -> Scheduled:
    """What a machine has run of a coarse graph, of the graph itself."""
    schedule = coarse.expand(Schedule(tuple(machine.instructions), machine.lifetimes.kept))
    return Scheduled(schedule, simulate(graph, schedule))


def _frugal(graph: TaskGraph, most: int, tolerance: float, bisections: int) -> Machine:
    """The least memory that allows a makespan within ``tolerance`` of the best in ``most`` bytes, by bisection."""
    best = _Search(graph, most, 0.0).best
    enough, low = best.makespan * (1 + tolerance), least_peak(graph)
    for _ in range(bisections):
        budget = (low + best.peak) // 2
        if budget in (low, best.peak):
            break
        found = _Search(graph, budget, enough).best
        if found.makespan <= enough:
            best = found
        else:
            low = budget
    return best


class _Search:
    """The best program found, ``best``, within ``budget``; it stops at a makespan of ``enough``."""

    def __init__(self, graph: TaskGraph, budget: int, enough: float) -> None:
        self.graph, self.budget = graph, budget
        # What comes this close to the bound is not worth the time to better.
        self.enough = max(enough, lower_bound(graph, budget).makespan * 1.0001)
        for kept in (free_to_keep(graph), frozenset[int]()):
            self.frame = Frame.build(Lifetimes(graph, kept), ())
            self.best = synchronous(self.frame.lifetimes, self.frame.jobs)[0]
            if self.best.peak <= budget:
                break  # else the scratch of what is reduced in between has found no room
        self.settings = self._sweep(self.frame)
        first, second = self.frame.least
        self._keep(keepable(graph, [held + max(second) for held in first], budget))
        self._merge()
        if any(self.frame.least[1]):
            self._trade()
        if len(self.frame.jobs) <= _SMALL:
            self._exchange()
            self._refine()

    def _sweep(self, frame: Frame) -> tuple[Setting, ...]:
        """Tries all settings, where there are two memories with the spare one halved, and the best of them with other
        shares. Returns those that are to be tried for other frames: in a large graph the best."""
        even, *others = _SHARES
        settings = list(itertools.starmap(Setting, itertools.product((even,), POLICIES, _AHEAD, (True, False))))
        few = _SETTINGS_OF_LARGE if len(frame.jobs) > _SMALL else len(settings)
        makespans = self._try_each(frame, settings)
        ranked = sorted(settings, key=makespans.__getitem__)[:few]  # stable: equals stay in their order
        if any(frame.least[1]):
            uneven = [setting._replace(share=share) for share in others for setting in ranked]
            makespans |= self._try_each(frame, uneven)
            ranked = sorted([*ranked, *uneven], key=makespans.__getitem__)[:few]
        return tuple(ranked)

    def _keep(self, order: tuple[int, ...]) -> None:
        """Keeps the first of the outputs worth keeping: tries a few numbers of them, then those around the best."""
        step = max(1, -(-len(order) // _KEPT_TRIALS))
        counts = [*range(step, len(order), step), len(order)] if order else []
        while counts:
            for count in counts:
                self._try_all(Lifetimes(self.graph, frozenset(order[:count])), ())
            best = len(self.best.lifetimes.kept)
            counts = [count for count in (best - step // 2, best + step // 2) if step > 1 and 0 < count < len(order)]
            step //= 2

    def _merge(self) -> None:
        """Has neighbours share collectives: of all classes of transfers or of one, and then of each class otherwise."""
        lifetimes = self.best.lifetimes
        lines = mergeable(self.graph, lifetimes.kept)
        cut = [[each.of(self.graph, line) for each in CUTS] for line in lines]
        tried: set[frozenset[Group]] = set()  # of a short line, many cuts are one

        def attempt(groups: Sequence[Group]) -> None:
            if (key := frozenset(groups)) not in tried:
                tried.add(key)
                self._try_all(lifetimes, groups)

        for alike in zip(*cut, strict=True):
            attempt([*itertools.chain.from_iterable(alike)])
            for groups in alike:
                attempt(groups)
        if len(lines) > 1:
            for line, ways in zip(lines, cut, strict=True):
                others = [job.transfers for job in self.frame.jobs if job.transfers[0] not in line]
                for groups in ways:
                    attempt([*others, *groups])

    def _trade(self) -> None:
        """Gives each memory in turn what the other one leaves, while that helps."""
        before = None
        while before is not self.best:
            before = self.best
            for setting in self.settings:
                for limits in _left(self.best.most, self.budget):
                    self._try_within(limits, self.frame, setting)

    def _exchange(self) -> None:
        """Keeps one output more or less, or one instead of another, while that helps."""
        repeats = [index for index, transfer in enumerate(self.graph.transfers) if transfer.repeats is not None]
        changes = [{index} for index in repeats] + [set(pair) for pair in itertools.combinations(repeats, 2)]
        before = None
        while before is not self.best:
            before = self.best
            for change in changes:
                self._try_all(Lifetimes(self.graph, self.best.lifetimes.kept ^ change), ())

    def _refine(self) -> None:
        """Swaps neighbours in the order of launches while that helps."""
        trials, improved = _SWAPS, True
        while improved and trials > 0:
            improved = False
            before = self.best
            by_transfers = {job.transfers: job for job in self.frame.jobs}
            sequence = [by_transfers[item.transfers] for item in before.collectives]
            for place in range(len(sequence) - 1):
                first, second = sequence[place : place + 2]
                if bool(first.ready) == bool(second.ready) or trials <= 0:
                    continue  # the scheduler itself orders gathers among themselves, and reductions
                trials -= 1
                swapped = [*sequence[:place], second, first, *sequence[place + 2 :]]
                setting = Setting(_SHARES[0], in_order(swapped), _UNLIMITED, True)
                for limits in _left(before.most, self.budget):
                    self._try_within(limits, self.frame, setting)
                if self.best is not before:
                    improved = True
                    break

    def _try_all(self, lifetimes: Lifetimes, grouping: Grouping) -> None:
        if self.best.makespan > self.enough:
            self._try_each(Frame.build(lifetimes, grouping), self.settings)

    def _try_each(self, frame: Frame, settings: Sequence[Setting]) -> dict[Setting, float]:
        """Runs the list scheduler under each setting, until what there is will do, and returns the makespans that are
        of interest: of others, infinity."""
        makespans: dict[Setting, float] = {}
        free: dict[Setting, tuple[int, float]] = {}  # the least ``ahead`` that held nothing back, and its makespan
        for setting in settings:
            alike = setting._replace(ahead=_UNLIMITED)
            if alike in free and free[alike][0] <= setting.ahead:
                makespans[setting] = free[alike][1]
                continue
            limits = frame.limits(self.budget, setting.share)
            found = (math.inf, True) if limits is None else self._try_within(limits, frame, setting)
            makespans[setting], held_back = found
            if not held_back:
                free[alike] = setting.ahead, makespans[setting]
        return makespans

    def _try_within(self, limits: Bytes, frame: Frame, setting: Setting) -> tuple[float, bool]:
        """The makespan under a setting, infinite if it is of no interest, and whether it held anything back."""
        if self.best.makespan <= self.enough:
            return math.inf, True
        limit = self.best.makespan * _LIMIT
        _, policy, ahead, patient = setting
        machine, held_back = list_schedule(frame, limits, policy, ahead=ahead, patient=patient, limit=limit)
        if machine is None:
            return math.inf, held_back
        if self._better(machine):
            self.best, self.frame = machine, frame
        return machine.makespan, held_back

    def _better(self, machine: Machine) -> bool:
        """Faster, or as fast with less memory; sums in another order differ in their last digits."""
        margin = 1e-9 * self.best.makespan
        if abs(machine.makespan - self.best.makespan) <= margin:
            return machine.peak < self.best.peak
        return machine.makespan < self.best.makespan


def _left(most: Sequence[int], budget: int) -> tuple[Bytes, ...]:
    """Limits under which a memory gets all of a budget that the other has left."""
    first, second = most
    return ((budget - second, second), (first, budget - first)) if second else ((budget, 0),)
