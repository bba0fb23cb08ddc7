"""Which schedule a graph gets, by its time and by the slots that it takes."""

import math
from types import SimpleNamespace

import pytest

from vescale_compile.passes import fitting
from vescale_compile.passes.fitting import Fitting


def test_of_the_schedules_whose_slots_fit_the_fastest_is_looked_for(monkeypatch):
    def found(tasks, limit):
        return SimpleNamespace(limit=limit, timeline=SimpleNamespace(makespan=-limit, peak_bytes=limit))

    def planned(schedule):  # what uses more than 650 bytes wastes 400
        return schedule.limit + (400 if schedule.limit > 650 else 0)

    monkeypatch.setattr(fitting, "find_schedule", found)
    monkeypatch.setattr(fitting, "lower_bound", lambda tasks: SimpleNamespace(makespan=-math.inf))
    best, taken = Fitting(None, 1000, 100, planned).fastest()
    assert 650 - 900 / 16 < best.limit <= 650 and taken == best.limit


def test_within_a_budget_limits_are_tried_beyond_one_whose_slots_did_not_fit(monkeypatch):
    def found(tasks, limit):
        makespan = 1.4 if limit > 500 else 3.0
        return SimpleNamespace(limit=limit, timeline=SimpleNamespace(makespan=makespan, peak_bytes=limit))

    def planned(schedule):  # those around the first that is tried after the budget itself waste the most
        return schedule.limit + (600 if 500 < schedule.limit < 700 else 400 if schedule.limit == 1000 else 0)

    monkeypatch.setattr(fitting, "find_schedule", found)
    monkeypatch.setattr(fitting, "lower_bound", lambda tasks: SimpleNamespace(makespan=1.0))
    best, taken = Fitting(None, 1000, 0, planned).fastest()
    assert best.timeline.makespan == 1.4 and taken <= 1000


@pytest.mark.parametrize(
    ("seconds", "there_are", "taken"),
    [
        ({1000: 1.04, 2000: 1.0}, 9000, 1000),  # near the bound, of 1 s
        ({1000: 3.0, 2000: 2.0, 4000: 1.9}, 9000, 1000),  # twice the memory for two thirds of the time
        ({1000: 3.0, 2000: 1.4, 4000: 1.0}, 9000, 2000),
        ({1000: 9.0, 2000: 8.0, 4000: 1.0}, 9000, 4000),
        ({1000: 9.0, 2000: 4.0, 4000: 1.0}, 3000, 2000),
        ({1000: 9.0, 2000: 4.0, 4000: 1.0}, 500, 1000),
        ({1000: 80.0, 2000: 38.0, 4000: 18.0, 8000: 8.0, 16000: 7.0}, 99000, 8000),  # while twice as much pays
        ({1000: 80.0, 2000: 38.0, 4000: 18.0, 8000: 8.0, 16000: 7.0}, 5000, 4000),
        ({1000: 80.0, 2000: 38.0, 4000: 20.0, 8000: 1.0}, 99000, 2000),
    ],
)
def test_without_a_budget_more_memory_is_taken_for_more_of_the_time_as_far_as_the_device_has_it(
    seconds, there_are, taken, monkeypatch
):
    def found(tasks, limit):
        makespan = seconds[max(known for known in seconds if known <= limit)]
        return SimpleNamespace(limit=limit, timeline=SimpleNamespace(makespan=makespan, peak_bytes=limit))

    monkeypatch.setattr(fitting, "find_schedule", found)
    monkeypatch.setattr(fitting, "lower_bound", lambda tasks: SimpleNamespace(makespan=1.0))
    best, _ = Fitting(None, 1000, 0, lambda schedule: schedule.limit).worth_most(there_are)
    assert best.limit == taken


def test_memory_within_the_budget_is_no_price_for_time(monkeypatch):
    def found(tasks, limit):
        makespan = 1.2 if limit >= 1000 else 2.5
        return SimpleNamespace(limit=limit, timeline=SimpleNamespace(makespan=makespan, peak_bytes=limit))

    def planned(schedule):
        return schedule.limit + (500 if schedule.limit >= 1000 else 100)

    monkeypatch.setattr(fitting, "find_schedule", found)
    monkeypatch.setattr(fitting, "lower_bound", lambda tasks: SimpleNamespace(makespan=1.0))
    best, taken = Fitting(None, 1000, 0, planned).worth_most(9000)
    assert (best.timeline.makespan, taken) == (1.2, 1500)  # not 2.5 s in the 600 bytes that would fit


def test_as_little_memory_as_is_as_fast_is_looked_for_between_two_limits(monkeypatch):
    def found(tasks, limit):
        makespan = 1.4 if limit >= 1300 else 3.0
        return SimpleNamespace(limit=limit, timeline=SimpleNamespace(makespan=makespan, peak_bytes=limit))

    monkeypatch.setattr(fitting, "find_schedule", found)
    monkeypatch.setattr(fitting, "lower_bound", lambda tasks: SimpleNamespace(makespan=1.0))
    best, _ = Fitting(None, 1000, 0, lambda schedule: schedule.limit).worth_most(9000)
    assert 1300 <= best.limit < 1300 * 1.05


def test_slots_may_exceed_what_overlap_is_to_take_if_that_saves_more_of_the_time_than_it_takes_of_the_memory(
    monkeypatch,
):
    def found(tasks, limit):
        makespan = 1.0 if limit > 650 else 3.0
        return SimpleNamespace(limit=limit, timeline=SimpleNamespace(makespan=makespan, peak_bytes=limit))

    def planned(schedule):
        return schedule.limit + (400 if schedule.limit > 650 else 0)

    monkeypatch.setattr(fitting, "find_schedule", found)
    monkeypatch.setattr(fitting, "lower_bound", lambda tasks: SimpleNamespace(makespan=1.0))
    assert 1050 < Fitting(None, 1000, 600, planned).worth_most(9000)[1] < 1100
    assert Fitting(None, 1000, 600, planned).fastest()[1] <= 650
