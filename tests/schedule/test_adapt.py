"""One order of launches for graphs that are cut differently."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import sharded_steps
from test_coarsen import split
from test_early import launches

from vescale_compile.schedule import (
    Compute,
    Launch,
    Run,
    Schedule,
    ScheduleError,
    TaskGraph,
    Transfer,
    Wait,
    find_schedule,
    least_peak,
    simulate,
)
from vescale_compile.schedule.adapt import adapt, touches


@settings(max_examples=30, derandomize=True)
@given(sharded_steps(3), st.integers(0, 6), st.integers(2, 4))
def test_a_graph_with_more_tasks_launches_the_same_in_as_long(graph: TaskGraph, room: int, parts: int) -> None:
    found, fine = find_schedule(graph, least_peak(graph) + room), split(graph, parts)
    adapted = adapt(found.schedule, touches(graph), len(graph.compute), fine)
    assert [each for each, _ in launches(adapted)] == [each for each, _ in launches(found.schedule)]
    assert simulate(fine, adapted).makespan == pytest.approx(found.timeline.makespan)


@settings(max_examples=30, derandomize=True)
@given(sharded_steps(3), st.integers(0, 6), st.integers(2, 4))
def test_a_graph_with_fewer_tasks_launches_the_same(graph: TaskGraph, room: int, parts: int) -> None:
    fine = split(graph, parts)
    found = find_schedule(fine, least_peak(fine) + room)
    adapted = adapt(found.schedule, touches(fine), len(fine.compute), graph)
    assert [each for each, _ in launches(adapted)] == [each for each, _ in launches(found.schedule)]
    simulate(graph, adapted)  # which checks that it may run so


def test_a_launch_comes_before_its_place_where_one_after_it_must() -> None:
    compute = tuple(Compute(name, 1.0) for name in ("writes", "between", "reads"))
    reduction, gather = Transfer("reduction", 0.0, 1.0, writers=(0,)), Transfer("gather", 0.0, 1.0, readers=(2,))
    both_after = Schedule((Run(0), Run(1), Launch((0,)), Launch((1,)), Wait((1,)), Run(2), Wait((0,))))
    fused = TaskGraph(compute[:2], (reduction, replace(gather, readers=(1,))))
    adapted = adapt(both_after, touches(TaskGraph(compute, (reduction, gather))), 3, fused)
    assert launches(adapted) == [((0,), 1), ((1,), 1)]
    simulate(fused, adapted)


def _gather_after_reduction(*, in_one_task: bool) -> TaskGraph:
    compute = (Compute("writes", 1.0), Compute("reads", 1.0))
    reduction = Transfer("reduction", 0.0, 1.0, writers=(0,))
    gather = Transfer("gather", 0.0, 1.0, readers=(0 if in_one_task else 1,))
    return TaskGraph(compute, (reduction, gather))


def test_what_one_task_writes_and_reads_can_not_be_sent_before_it_is_read() -> None:
    graph = _gather_after_reduction(in_one_task=False)
    schedule = Schedule((Run(0), Launch((0,)), Launch((1,)), Wait((1,)), Run(1), Wait((0,))))
    simulate(graph, schedule)
    with pytest.raises(ScheduleError, match="reduction: ready for a launch at position 1, and due at position 0"):
        adapt(schedule, touches(graph), 2, _gather_after_reduction(in_one_task=True))
