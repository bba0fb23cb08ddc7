"""Which of the schedules a graph gets: slots take more than what lies in them, and time is worth memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ..schedule import Scheduled, TaskGraph, find_schedule, lower_bound

_ATTEMPTS = 6  # at a schedule whose slots fit
_ROUNDING = 1 + 1e-9  # sums in another order differ in their last digits
_CLOSE = 1 / 16  # of the budget's room, between one that fits and one that does not
_NEAR = 1.05  # times the bound: what takes no longer is not worth more memory
_MORE = (2, 4)  # times the budget's room, for what is far from the bound
_BETWEEN = 8  # attempts, for such, at less memory for as much time

Planned = tuple[Scheduled, int]
"""A schedule, and the bytes that the step takes with it."""


@dataclass(frozen=True)
class Fitting:
    """The search for one graph's schedule.

    Attributes:
        tasks: what is scheduled.
        budget: bytes that the step is to take.
        least: bytes that a schedule takes which overlaps nothing.
        planned_with: the bytes that the step takes with a schedule.
    """

    tasks: TaskGraph
    budget: int
    least: int
    planned_with: Callable[[Scheduled], int]

    def fastest(self) -> Planned:
        """The fastest found that fits in the budget; if none does, the last that was tried."""
        return self._fastest_of(self._attempts())

    def worth_most(self, there_are: float) -> Planned:
        """The fastest found, if it fits in the budget and is near the bound. If not, the one whose time and memory have
        the least product, of those tried and of some that may take more: more of the memory is taken for more of the
        time, as far as ``there_are`` as many bytes."""
        bound = lower_bound(self.tasks).makespan
        tried = self._attempts()
        fitting = self._fastest_of(tried)
        if fitting[1] <= self.budget and _seconds(fitting) <= bound * _NEAR:
            return fitting
        for times in _MORE:
            limit = self.least + times * max(self.budget - self.least, 0)
            tried[limit] = self._planned(limit)
            if _seconds(tried[limit]) <= bound * _NEAR:
                break
        self._look_between(tried)
        affordable = [each for each in tried.values() if each[1] <= max(there_are, fitting[1])]
        return min(affordable, key=_cost)

    def _look_between(self, tried: dict[int, Planned]) -> None:
        """Adds schedules with limits between two that were tried. How well slots fill what they take differs from limit
        to limit, so one in between may be as fast as with the larger, in little more than the smaller."""
        close = _CLOSE * (self.budget - self.least)
        for _ in range(_BETWEEN):
            apart = [(low, high) for low, high in pairwise(sorted(tried)) if high - low > close]
            hopes = [(_seconds(tried[high]) * low, low, high) for low, high in apart]
            hope, low, high = min(hopes, default=(math.inf, 0, 0))
            if hope * _NEAR > min(map(_cost, tried.values())):
                return
            middle = (low + high) // 2
            tried[middle] = self._planned(middle)

    def _attempts(self) -> dict[int, Planned]:
        """Schedules on the way to the fastest that fits, by the bytes that each was limited to.

        Slots are never as full as they are large: where they exceed the budget, the schedule gets less, and then again
        more, halfway to what exceeded it, until one is as fast as with all of the budget."""
        low, high = self.least, max(self.budget, self.least)
        limit, fastest, best = high, math.inf, math.inf
        tried: dict[int, Planned] = {}
        for _ in range(_ATTEMPTS):
            found, planned = tried[limit] = self._planned(limit)
            fastest = min(fastest, found.timeline.makespan)
            if planned <= self.budget:
                best = min(best, found.timeline.makespan)
                low = limit
            else:
                high = min(limit, found.timeline.peak_bytes)
            close = high - low < _CLOSE * (self.budget - self.least)
            if best <= fastest * _ROUNDING or (best < math.inf and close) or low >= high:
                break
            limit = (low + high) // 2 if best < math.inf else max(high - (planned - self.budget), self.least)
        return tried

    def _fastest_of(self, tried: dict[int, Planned]) -> Planned:
        fitting = [each for each in tried.values() if each[1] <= self.budget]
        return min(fitting, key=_seconds, default=[*tried.values()][-1])

    def _planned(self, limit: int) -> Planned:
        found = find_schedule(self.tasks, limit)
        return found, self.planned_with(found)


def _cost(each: Planned) -> float:
    """Time times memory."""
    return _seconds(each) * each[1]


def _seconds(each: Planned) -> float:
    return each[0].timeline.makespan
