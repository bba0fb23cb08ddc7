"""Coarse graphs: the same times and the same memory in fewer tasks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import sharded_steps

from vescale_compile.schedule import Compute, TaskGraph, find_schedule, least_peak, simulate
from vescale_compile.schedule.coarsen import coarsen


def split(graph: TaskGraph, parts: int) -> TaskGraph:
    """``graph`` with each compute task in ``parts``; a transfer is read and written by all of them."""
    fields = [{name: getattr(t, name) for name in t.__dataclass_fields__} for t in graph.transfers]
    for each in fields:
        for uses in ("writers", "readers"):
            each[uses] = tuple(parts * position + part for position in each[uses] for part in range(parts))
    tasks = [Compute(f"{c.name}.{i}", c.duration / parts, c.live_bytes) for c in graph.compute for i in range(parts)]
    return TaskGraph(tuple(tasks), tuple(type(graph.transfers[0])(**each) for each in fields))


@settings(max_examples=30, derandomize=True)
@given(sharded_steps(4), st.integers(2, 5))
def test_parts_of_a_task_are_joined_again(graph: TaskGraph, parts: int) -> None:
    coarse = coarsen(split(graph, parts), 1)
    assert [task.live_bytes for task in coarse.graph.compute] == [task.live_bytes for task in graph.compute]
    assert coarse.graph.transfers == graph.transfers
    assert coarse.starts == tuple(range(0, parts * len(graph.compute) + 1, parts))
    assert least_peak(coarse.graph) == least_peak(split(graph, parts))


@settings(max_examples=15, derandomize=True)
@given(sharded_steps(3), st.integers(0, 6))
def test_a_coarse_schedule_does_the_same_in_the_fine_graph(graph: TaskGraph, room: int) -> None:
    fine = split(graph, 4)
    coarse = coarsen(fine, 1)
    found = find_schedule(coarse.graph, least_peak(graph) + room)
    expanded = simulate(fine, coarse.expand(found.schedule))
    assert expanded.makespan == pytest.approx(found.timeline.makespan)
    assert expanded.peak_bytes == found.timeline.peak_bytes


def test_long_tasks_stay_apart_so_that_transfers_can_start_in_between() -> None:
    graph = TaskGraph(tuple(Compute(str(i), 1.0) for i in range(10)), ())
    assert len(coarsen(graph, 2).graph.compute) == 2
    assert len(coarsen(graph, 100).graph.compute) == 10
