"""The list scheduler against exhaustive search, and what it does with a budget."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from exhaustive import best_schedule
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import any_graphs, sharded_steps

from vescale_compile.schedule import (
    BudgetError,
    Compute,
    Launch,
    Schedule,
    Scheduled,
    TaskGraph,
    Transfer,
    Wait,
    check_budget,
    find_schedule,
    least_peak,
    lower_bound,
    simulate,
)

room = st.integers(0, 6)
examples = settings(max_examples=40, derandomize=True)
few_examples = settings(max_examples=10, derandomize=True)


def optimum(graph: TaskGraph, budget: int | None = None, most: float = math.inf) -> float:
    """Of which it is known that it is at most ``most``."""
    schedule = best_schedule(graph, budget, most * (1 + 1e-9) + 1e-9)
    assert schedule is not None
    timeline = simulate(graph, schedule)
    assert budget is None or timeline.peak_bytes <= budget
    return timeline.makespan


@pytest.mark.parametrize(
    "steps",
    [
        sharded_steps(2),
        sharded_steps(2, lanes=2),
        sharded_steps(2, load=0.25),
        sharded_steps(2, launch=0.5),
        sharded_steps(2, issue=1),
        sharded_steps(2, apart=True),
        pytest.param(sharded_steps(2, merge=True), marks=pytest.mark.slow),
    ],
    ids=["one lane", "two lanes", "loading the device", "with launches", "with a host", "memories apart", "mergeable"],
)
def test_two_units_are_scheduled_as_exhaustive_search_does(steps: st.SearchStrategy[TaskGraph]) -> None:
    @examples
    @given(steps, room)
    def check(graph: TaskGraph, room: int) -> None:
        budget = least_peak(graph) + room
        found = find_schedule(graph, budget)
        assert found.timeline.makespan == pytest.approx(optimum(graph, budget, found.timeline.makespan))

    check()


@pytest.mark.slow
@settings(max_examples=30, derandomize=True)
@given(sharded_steps(3), room)
def test_three_units_are_scheduled_within_5_percent_of_the_optimum(graph: TaskGraph, room: int) -> None:
    budget = least_peak(graph) + room
    found = find_schedule(graph, budget)
    assert best_schedule(graph, budget, below=found.timeline.makespan / 1.05 * (1 - 1e-9)) is None


@pytest.mark.slow
@examples
@given(sharded_steps(2, then=2), room)
def test_what_goes_over_other_links_then_is_scheduled_within_5_percent_of_the_optimum(
    graph: TaskGraph, room: int
) -> None:
    budget = least_peak(graph) + room
    found = find_schedule(graph, budget).timeline.makespan
    assert found <= 1.05 * optimum(graph, budget, found)


def test_a_gather_flies_while_what_was_reduced_goes_over_other_links() -> None:
    """There is no room for it beside the first task, and none for the first's gradients beside the second."""
    gather = Transfer("gather", 0.0, 3.0, readers=(1,), output_bytes=1)
    reductions = [
        Transfer(f"reduce {i}", 0.0, 1.0, writers=(i,), input_bytes=1 + i, then_wire_time=3.0) for i in range(2)
    ]
    graph = TaskGraph(
        (Compute("first", 1.0, live_bytes=4), Compute("second", 1.0, live_bytes=2)), (gather, *reductions)
    )
    assert find_schedule(graph, 5).timeline.makespan == 1 + (1 + 3) + 1 + (1 + 3)


@examples
@given(st.one_of(sharded_steps(2, merge=True), sharded_steps(2, issue=4), sharded_steps(2, merge=True, then=8)), room)
def test_no_schedule_is_faster_than_the_lower_bound(graph: TaskGraph, room: int) -> None:
    budget = least_peak(graph) + room
    best = optimum(graph, budget, find_schedule(graph, budget).timeline.makespan)
    assert lower_bound(graph, budget).makespan <= best * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=150, derandomize=True)
@given(any_graphs(), room)
def test_schedules_of_any_graph_lie_between_the_bound_and_one_and_a_half_times_the_optimum(
    graph: TaskGraph, room: int
) -> None:
    budget = least_peak(graph) + room
    found = find_schedule(graph, budget)
    best = optimum(graph, budget, found.timeline.makespan)
    assert found.timeline.peak_bytes <= budget
    assert lower_bound(graph, budget).makespan <= best + 1e-9
    assert best - 1e-9 <= found.timeline.makespan <= 1.5 * best + 1e-9


def launches(schedule: Schedule) -> list[tuple[int, ...]]:
    return [each.transfers for each in schedule.instructions if isinstance(each, Launch)]


@few_examples
@given(sharded_steps(6, merge=True), room)
def test_the_budget_is_kept_and_every_transfer_is_placed(graph: TaskGraph, room: int) -> None:
    budget = least_peak(graph) + room
    found = find_schedule(graph, budget)
    assert found.timeline.peak_bytes <= budget
    placed = [index for transfers in launches(found.schedule) for index in transfers]
    assert sorted([*placed, *found.schedule.kept]) == list(range(len(graph.transfers)))


@examples
@given(sharded_steps(2))
def test_below_the_least_peak_there_is_no_schedule(graph: TaskGraph) -> None:
    assert best_schedule(graph, least_peak(graph)) is not None
    assert best_schedule(graph, least_peak(graph) - 1) is None


@few_examples
@given(sharded_steps(4, lanes=2, merge=True), room)
def test_the_schedule_depends_on_the_graph_and_the_budget_alone(graph: TaskGraph, room: int) -> None:
    again = TaskGraph(tuple(graph.compute), tuple(graph.transfers))
    budget = least_peak(graph) + room
    assert find_schedule(graph, budget).schedule == find_schedule(again, budget).schedule


def test_launches_are_part_of_the_bound() -> None:
    gathers = [Transfer(f"gather {i}", 0.0, 0.5, readers=(0,), load=0.2, launch=1.0) for i in range(4)]
    graph = TaskGraph((Compute("reads all", 10.0),), tuple(gathers))
    bound = lower_bound(graph)
    assert find_schedule(graph).timeline.makespan == bound.compute == bound.critical_path == 10.0 + 4 * 1.0


def layers(count: int, gather: float, compute: float, size: int, *, latency: float = 0.0) -> TaskGraph:
    """Equal layers whose backward takes twice the time of their forward."""
    last = 2 * count - 1
    tasks = [Compute(f"layer {i}", compute) for i in range(count)]
    tasks += [Compute(f"layer {i} backward", 2 * compute) for i in reversed(range(count))]
    merge = "all" if latency else None
    transfers = [
        Transfer(f"gather {i}", latency, gather, readers=(i,), output_bytes=size, merge=merge) for i in range(count)
    ]
    transfers += [
        Transfer(f"gather {i} again", latency, gather, readers=(last - i,), output_bytes=size, repeats=i, merge=merge)
        for i in range(count)
    ]
    transfers += [Transfer(f"reduce {i}", latency, gather, writers=(last - i,), input_bytes=size) for i in range(count)]
    return TaskGraph(tuple(tasks), tuple(transfers))


def kept(graph: TaskGraph, found: Scheduled) -> set[str]:
    return {graph.transfers[index].name for index in found.schedule.kept}


def test_where_computation_dominates_all_but_the_ends_is_hidden() -> None:
    graph = layers(10, gather=1.0, compute=3.0, size=1)
    found = find_schedule(graph, 4)
    assert found.timeline.makespan == lower_bound(graph, 4).critical_path == 1 + 90 + 1
    assert kept(graph, found) == {"gather 9 again"}


def test_where_the_wire_dominates_memory_is_spent_on_keeping_what_is_needed_again_first() -> None:
    graph = layers(10, gather=3.0, compute=1.0, size=1)
    assert kept(graph, find_schedule(graph, 2)) <= {"gather 9 again"}
    found = find_schedule(graph, 6)
    assert kept(graph, found) >= {f"gather {i} again" for i in (7, 8, 9)}
    assert found.timeline.makespan < 1.05 * lower_bound(graph, 6).makespan


def test_what_is_needed_again_at_once_is_kept_whatever_the_budget() -> None:
    graph = layers(4, gather=1.0, compute=9.0, size=1)
    assert kept(graph, find_schedule(graph, least_peak(graph))) >= {"gather 3 again"}


def test_more_memory_never_hurts_much_and_helps_where_it_is_short() -> None:
    graph = layers(10, gather=3.0, compute=3.0, size=1)
    times = [find_schedule(graph, budget).timeline.makespan for budget in (2, 3, 4, 6, 10, 30)]
    assert all(after <= before * 1.001 for before, after in pairwise(times))
    assert times[-1] < 0.8 * times[0]


def test_small_transfers_share_collectives_where_latency_dominates() -> None:
    graph = layers(8, gather=0.1, compute=0.5, size=1, latency=2.0)
    found = find_schedule(graph, 40)
    assert max(map(len, launches(found.schedule))) > 1
    alone = TaskGraph(graph.compute, tuple(_unmergeable(transfer) for transfer in graph.transfers))
    assert found.timeline.makespan < find_schedule(alone, 40).timeline.makespan


def gathered(count: int, gather: float, compute: float, latency: float) -> TaskGraph:
    """The forward of as many layers."""
    gathers = (
        Transfer(f"gather {i}", latency, gather, readers=(i,), output_bytes=1, merge="all") for i in range(count)
    )
    return TaskGraph(tuple(Compute(f"layer {i}", compute) for i in range(count)), tuple(gathers))


def test_the_last_to_share_collectives_are_few_where_all_wait_for_the_wire() -> None:
    """What is left to be computed when they have come is exposed."""
    sizes = [len(group) for group in launches(find_schedule(gathered(24, 2.0, 2.0, 0.5), 1000).schedule)]
    assert sizes[-1] == 1 < max(sizes)


def test_gathers_and_reductions_share_collectives_by_different_numbers() -> None:
    plain = gathered(12, 0.1, 4.0, 2.0)
    scattered = (Transfer(f"reduce {i}", 0.5, 3.0, writers=(i,), input_bytes=40, merge="reductions") for i in range(12))
    graph = replace(plain, transfers=(*plain.transfers, *scattered))
    groups = launches(find_schedule(graph, 200).schedule)
    gathers, reductions = ({len(group) for group in groups if (group[0] < 12) == first} for first in (True, False))
    assert max(gathers) > max(reductions)


@pytest.mark.slow
def test_small_transfers_share_collectives_where_the_host_takes_longest() -> None:
    plain = layers(12, gather=0.1, compute=2.0, size=1)
    calls = tuple(
        replace(transfer, call=1.0, merge=None if transfer.writers else "gathers") for transfer in plain.transfers
    )
    found = find_schedule(replace(plain, compute=tuple(replace(c, issue=2.0) for c in plain.compute), transfers=calls))
    alone = find_schedule(replace(plain, transfers=calls))
    gathers, one_by_one = ([len(each) for each in launches(schedule.schedule)] for schedule in (found, alone))
    assert max(gathers) > 2 and max(one_by_one) == 1


@pytest.mark.slow
def test_small_transfers_share_collectives_where_the_host_is_not_done_before_the_device() -> None:
    plain = layers(8, gather=0.1, compute=2.0, size=1)
    calls = tuple(
        replace(transfer, call=1.0, merge=None if transfer.writers else "gathers") for transfer in plain.transfers
    )
    done, behind = (find_schedule(replace(plain, transfers=calls, after=after)) for after in (0.0, 40.0))
    assert [max(map(len, launches(found.schedule))) > 2 for found in (done, behind)] == [False, True]
    assert behind.timeline.issued < done.timeline.issued + 40.0


def _unmergeable(transfer: Transfer) -> Transfer:
    fields = {name: getattr(transfer, name) for name in Transfer.__dataclass_fields__}
    return Transfer(**{**fields, "merge": None})


def test_without_a_budget_no_more_memory_is_taken_than_the_speed_is_worth() -> None:
    graph = layers(10, gather=1.0, compute=3.0, size=1)
    found = find_schedule(graph)
    assert found.timeline.makespan <= 1.01 * find_schedule(graph, 100).timeline.makespan
    assert found.timeline.peak_bytes <= 4


def test_a_budget_that_nothing_fits_in_is_refused_with_what_takes_the_memory() -> None:
    graph = TaskGraph(
        (Compute("layer", 1.0, 70), Compute("layer backward", 1.0, 80)),
        (
            Transfer("gather", 0.0, 1.0, readers=(0, 1), output_bytes=30),
            Transfer("reduce", 0.0, 1.0, writers=(1,), input_bytes=60),
        ),
    )
    message = (
        "memory_budget is 169 bytes, but even a schedule that overlaps nothing needs 170, at 'layer backward': "
        r"80 of layer backward's own \(activations, shards, states\), 60 of the input of reduce, "
        "30 of the output of gather. Give at least 170 bytes"
    )
    with pytest.raises(BudgetError, match=message) as error:
        find_schedule(graph, 169)
    assert error.value.least_bytes == 170
    assert find_schedule(graph, 170).timeline.peak_bytes == 170


def test_more_may_be_known_to_be_needed() -> None:
    graph = TaskGraph((Compute("layer", 1.0, 70),), (Transfer("gather", 0.0, 1.0, readers=(0,), output_bytes=30),))
    check_budget(graph, 120, needed=120)
    with pytest.raises(BudgetError, match=r"needs 120, .*70 of layer's own .*Give at least 120 bytes"):
        check_budget(graph, 119, needed=120)


def reduced_twice(scratch: int) -> TaskGraph:
    """Two equal layers' gradients of 10 bytes, the second written beside the first's reduction if there is room."""
    tasks = tuple(Compute(name, 2.0, 100) for name in ("second backward", "first backward", "end"))
    transfers = [
        Transfer(f"reduce {index}", 0.0, 2.0, writers=(index,), input_bytes=10, scratch_bytes=scratch)
        for index in range(2)
    ]
    return TaskGraph(tasks, tuple(transfers))


def test_scratch_takes_no_room_while_gradients_are_written() -> None:
    # 10 bytes are written beside 10 in flight with 8 of scratch; all scratch at once would make it 36.
    assert least_peak(reduced_twice(8)) == 100 + 10 + 8
    found = find_schedule(reduced_twice(8), 100 + 2 * 10 + 8)
    assert found.timeline.makespan == lower_bound(reduced_twice(8), 128).makespan == 6.0
    assert found.timeline.peak_bytes == 128
    assert find_schedule(reduced_twice(8), 127).timeline.makespan == 8.0


def test_the_next_reduction_is_launched_when_the_scratch_of_the_one_before_is_free() -> None:
    program = find_schedule(reduced_twice(8), 128).schedule.instructions
    assert program.index(Wait((0,))) < program.index(Launch((1,)))


def test_what_could_stay_is_brought_again_where_scratch_needs_its_room() -> None:
    graph = TaskGraph(
        (Compute("forward", 1.0, 0), Compute("backward", 1.0, 0)),
        (
            Transfer("gather", 0.0, 1.0, readers=(0,), output_bytes=100),
            Transfer("gather again", 0.0, 1.0, readers=(1,), output_bytes=100, repeats=0),
            Transfer("reduce", 0.0, 1.0, writers=(0,), input_bytes=10, scratch_bytes=100),
        ),
    )
    assert least_peak(graph) == 110
    assert find_schedule(graph, 110).timeline.peak_bytes == 110


def test_a_refused_budget_names_the_scratch_that_does_not_fit() -> None:
    with pytest.raises(BudgetError, match=r"needs 118, at 'second backward': 100 of .*, 8 of the scratch of reduce 0"):
        find_schedule(reduced_twice(8), 117)


def test_processes_whose_strings_hash_differently_find_the_same_schedule() -> None:
    source = (
        "from vescale_compile.published_graphs import published_graph; from vescale_compile.cost import gpu_cluster; "
        "from vescale_compile.schedule import find_schedule, least_peak; "
        "graph = published_graph('gpt-oss-120b', gpu_cluster('h100', 64), 8192); "
        "print(find_schedule(graph, least_peak(graph) + 30 * 10**9).schedule)"
    )
    command = [sys.executable, "-c", source]
    schedules = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(schedules) == 1
