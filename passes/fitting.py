"""Which of the schedules a graph gets: slots may take more than what lies in them, and time is worth memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..schedule import Scheduled, TaskGraph, find_schedule, lower_bound

_ATTEMPTS = 6  # at a schedule whose slots fit
_CLOSE = 1 / 16  # of the budget's room: between limits that are nearer none is tried
_NEAR = 1.05  # times the bound: what takes no longer is not worth more memory
_MORE = (2, 4, 8, 16, 32)  # times the budget's room, for what is far from the bound
_ALWAYS = 4  # of them; what is behind is tried as long as each is worth more than all before
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
        tried = self._attempts()
        fitting = self._fastest_of(tried)
        if fitting[1] > self.budget or _seconds(fitting) <= self._near:
            return fitting
        self._look_between(tried, lambda seconds, nbytes: seconds if nbytes <= self.budget else math.inf)
        return self._fastest_of(tried)

    def worth_most(self, there_are: float) -> Planned:
        """The fastest found, if it fits in the budget and is near the bound. If not, the one whose time and memory have
        the least product, of those tried and of some that may take more: more of the memory is taken for more of the
        time, as far as ``there_are`` as many bytes."""
        tried = self._attempts()
        fitting = self._fastest_of(tried)
        if fitting[1] <= self.budget and _seconds(fitting) <= self._near:
            return fitting
        for times in _MORE:
            best = min(self._cost_of(each) for each in tried.values())
            limit = self.least + times * max(self.budget - self.least, 0)
            tried[limit] = self._planned(limit)
            if _seconds(tried[limit]) <= self._near or (times >= _ALWAYS and self._cost_of(tried[limit]) >= best):
                break
        self._look_between(tried, self._cost)
        affordable = [each for each in tried.values() if each[1] <= max(there_are, fitting[1])]
        return min(affordable, key=self._cost_of)

    def _cost_of(self, each: Planned) -> float:
        return self._cost(_seconds(each), each[1])

    def _cost(self, seconds: float, nbytes: int) -> float:
        """Time times memory, of which there is as much as the budget in any case."""
        return seconds * max(nbytes, self.budget)

    @cached_property
    def _near(self) -> float:
        """Seconds that are near what no schedule can beat."""
        return lower_bound(self.tasks).makespan * _NEAR

    def _look_between(self, tried: dict[int, Planned], cost: Callable[[float, int], float]) -> None:
        """Adds schedules with limits between one that was tried and what another took. How well slots fill what they
        take differs from limit to limit, so one in between may be as fast as the other, in little more than the limit.

        Args:
            cost: of seconds and bytes, of which the least is sought.
        """
        close = _CLOSE * (self.budget - self.least)
        for _ in range(_BETWEEN):
            spans = [(low, tried[high][0].timeline) for low, high in pairwise(sorted(tried))]
            apart = [(low, found) for low, found in spans if found.peak_bytes - low > close]
            hopes = [(cost(found.makespan, low), low, found.peak_bytes) for low, found in apart]
            hope, low, high = min(hopes, default=(math.inf, 0, 0))
            if hope * _NEAR > min(cost(_seconds(each), each[1]) for each in tried.values()):
                return
            middle = (low + high) // 2
            tried[middle] = self._planned(middle)

    def _attempts(self) -> dict[int, Planned]:
        """Schedules by the bytes that each was limited to: what slots take more than they hold, and what crosses from
        graph to graph, is taken from the limit, until one fits."""
        limit = max(self.budget, self.least)
        tried: dict[int, Planned] = {}
        for _ in range(_ATTEMPTS):
            found, planned = tried[limit] = self._planned(limit)
            if planned <= self.budget or limit == self.least:
                break
            limit = max(found.timeline.peak_bytes - (planned - self.budget), self.least)
        return tried

    def _fastest_of(self, tried: dict[int, Planned]) -> Planned:
        fitting = [each for each in tried.values() if each[1] <= self.budget]
        return min(fitting, key=_seconds, default=[*tried.values()][-1])

    def _planned(self, limit: int) -> Planned:
        found = find_schedule(self.tasks, limit)
        return found, self.planned_with(found)


def _seconds(each: Planned) -> float:
    return each[0].timeline.makespan
