"""Launches as early as inputs, their order and the peak allow."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import any_graphs, sharded_steps

from vescale_compile.schedule import (
    Compute,
    Launch,
    Run,
    Schedule,
    Scheduled,
    TaskGraph,
    Transfer,
    Wait,
    find_schedule,
    launched_early,
    least_peak,
    simulate,
)
from vescale_compile.schedule.early import IN_FLIGHT, LONGER

NEVER_AHEAD = (Launch((0,)), Wait((0,)), Run(0), Launch((1,)), Wait((1,)), Run(1))


def two_gathers(*live_bytes: int, output_bytes: int) -> TaskGraph:
    return TaskGraph(
        tuple(Compute(f"task {i}", 1.0, nbytes) for i, nbytes in enumerate(live_bytes)),
        tuple(Transfer(f"gather {i}", 0.0, 1.0, readers=(i,), output_bytes=output_bytes) for i in range(2)),
    )


def early(graph: TaskGraph, *instructions: Run | Launch | Wait) -> tuple[Run | Launch | Wait, ...]:
    schedule = Schedule(instructions)
    return launched_early(graph, Scheduled(schedule, simulate(graph, schedule))).schedule.instructions


def test_what_takes_no_memory_is_launched_ahead_in_the_same_order() -> None:
    graph = two_gathers(10, 10, output_bytes=0)
    assert early(graph, *NEVER_AHEAD) == (Launch((0,)), Launch((1,)), Wait((0,)), Run(0), Wait((1,)), Run(1))


@pytest.mark.parametrize(("room", "ahead"), [(4, False), (5, True)])
def test_what_takes_memory_is_launched_where_the_peak_has_room_for_it(room: int, ahead: bool) -> None:
    graph = two_gathers(10, 10 + room, output_bytes=5)
    instructions = early(graph, *NEVER_AHEAD)
    assert (instructions.index(Launch((1,))) < instructions.index(Run(0))) == ahead
    assert simulate(graph, Schedule(instructions)).peak_bytes == 15 + room


def test_several_that_there_is_room_for_one_by_one_do_not_share_it() -> None:
    compute = tuple(Compute(f"task {i}", 1.0, nbytes) for i, nbytes in enumerate((10, 10, 16)))
    gathers = tuple(Transfer(f"gather {i}", 0.0, 1.0, readers=(i,), output_bytes=5) for i in range(3))
    graph = TaskGraph(compute, gathers)
    synchronous = [step for i in range(3) for step in (Launch((i,)), Wait((i,)), Run(i))]
    assert early(graph, *synchronous) == (
        *(Launch((0,)), Launch((1,)), Wait((0,)), Run(0)),
        *(Launch((2,)), Wait((1,)), Run(1), Wait((2,)), Run(2)),
    )


def test_a_reduction_is_launched_when_its_gradients_have_been_written_and_not_before() -> None:
    graph = TaskGraph(
        tuple(Compute(f"task {i}", 1.0) for i in range(3)), (Transfer("reduce", 0.0, 1.0, writers=(0, 1)),)
    )
    assert early(graph, Run(0), Run(1), Run(2), Launch((0,)), Wait((0,))) == (
        *(Run(0), Run(1), Launch((0,))),
        *(Run(2), Wait((0,))),
    )


def test_of_what_could_be_launched_at_once_a_few_are_in_flight() -> None:
    count = 9
    compute = tuple(Compute(f"task {i}", 1.0) for i in range(count))
    graph = TaskGraph(compute, tuple(Transfer(f"gather {i}", 0.0, 1.0, readers=(i,)) for i in range(count)))
    synchronous = [step for i in range(count) for step in (Launch((i,)), Wait((i,)), Run(i))]
    instructions = early(graph, *synchronous)
    assert instructions[: IN_FLIGHT + 2] == (
        *(Launch((i,)) for i in range(IN_FLIGHT)),
        Wait((0,)),
        Launch((IN_FLIGHT,)),
    )
    in_flight = accumulate(isinstance(each, Launch) - isinstance(each, Wait) for each in instructions)
    assert max(in_flight) == IN_FLIGHT


def launches(schedule: Schedule) -> list[tuple[tuple[int, ...], int]]:
    """Each collective, and how many compute tasks run before its launch, in the order of launches."""
    ran = accumulate(isinstance(each, Run) for each in schedule.instructions)
    places = zip(schedule.instructions, ran, strict=True)
    return [(each.transfers, position) for each, position in places if isinstance(each, Launch)]


@pytest.mark.slow
@given(any_graphs(), st.integers(0, 12))
def test_order_and_peak_stay_and_no_launch_is_later(graph: TaskGraph, room: int) -> None:
    found = find_schedule(graph, least_peak(graph) + room)
    moved = launched_early(graph, found)
    for (now, place), (then, before) in zip(launches(moved.schedule), launches(found.schedule), strict=True):
        assert now == then and place <= before
    assert moved.timeline == simulate(graph, moved.schedule)
    assert simulate(graph, moved.schedule).peak_bytes == simulate(graph, found.schedule).peak_bytes
    assert launched_early(graph, moved) == moved


@pytest.mark.slow
@given(sharded_steps(3), st.integers(0, 12))
def test_on_one_lane_nothing_ends_later(graph: TaskGraph, room: int) -> None:
    found = find_schedule(graph, least_peak(graph) + room)
    assert simulate(graph, launched_early(graph, found).schedule).makespan <= found.timeline.makespan


def test_a_launch_that_would_hold_up_what_is_needed_first_stays_where_it_was() -> None:
    compute = (Compute("writes", 1.0), Compute("beside", 1.0), Compute("reads", 9.0))
    reduction = Transfer("reduction", 0.0, 9.0, writers=(0,), lane="reductions")
    gather = Transfer("gather", 0.0, 2.0, readers=(2,), lane="gathers")
    graph = TaskGraph(compute, (reduction, gather))
    gather_first = (Launch((1,)), Run(0), Run(1), Wait((1,)), Launch((0,)), Run(2), Wait((0,)))
    assert early(graph, *gather_first) == gather_first


@pytest.mark.slow
@given(sharded_steps(3, lanes=2), st.integers(0, 12))
def test_on_two_lanes_nothing_ends_much_later(graph: TaskGraph, room: int) -> None:
    found = find_schedule(graph, least_peak(graph) + room)
    assert simulate(graph, launched_early(graph, found).schedule).makespan <= LONGER * found.timeline.makespan
