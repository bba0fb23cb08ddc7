"""The model of execution: each rule on a graph small enough to follow by hand."""

from dataclasses import replace

import pytest

from vescale_compile.schedule import (
    Compute,
    Launch,
    Run,
    Schedule,
    ScheduleError,
    TaskGraph,
    Timeline,
    Transfer,
    Wait,
    simulate,
)
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine


def transfer(name: str, seconds: float, **uses: object) -> Transfer:
    return Transfer(name, 0.0, seconds, **uses)  # type: ignore[arg-type]


def run(graph: TaskGraph, *instructions: Run | Launch | Wait, kept: tuple[int, ...] = ()) -> Timeline:
    return simulate(graph, Schedule(instructions, frozenset(kept)))


TWO_LAYERS = TaskGraph(
    (Compute("first", 3.0, 10), Compute("second", 4.0, 20)),
    (
        transfer("gather 1", 2.0, readers=(0,), output_bytes=5),
        transfer("gather 2", 5.0, readers=(1,), output_bytes=7),
    ),
)
ONE_AFTER_ANOTHER = (Launch((0,)), Wait((0,)), Run(0), Launch((1,)), Wait((1,)), Run(1))
PREFETCHED = (Launch((0,)), Launch((1,)), Wait((0,)), Run(0), Wait((1,)), Run(1))


def test_what_is_launched_where_it_is_needed_is_exposed() -> None:
    timeline = run(TWO_LAYERS, *ONE_AFTER_ANOTHER)
    assert (timeline.makespan, timeline.exposed) == (14.0, 7.0)


def test_what_is_launched_ahead_flies_while_the_computation_runs() -> None:
    timeline = run(TWO_LAYERS, *PREFETCHED)
    assert [(span.start, span.stop) for span in timeline.transfers] == [(0.0, 2.0), (2.0, 7.0)]
    assert timeline.runs == ((2.0, 5.0), (7.0, 11.0))
    assert (timeline.makespan, timeline.exposed, timeline.communication) == (11.0, 4.0, 7.0)


def test_an_output_is_held_from_its_launch_until_its_last_reader_has_run() -> None:
    assert run(TWO_LAYERS, *ONE_AFTER_ANOTHER).peak_bytes == 20 + 7
    early = (Launch((1,)), Launch((0,)), Wait((0,)), Run(0), Wait((1,)), Run(1))
    graph = TaskGraph((Compute("first", 3.0, 17), Compute("second", 4.0, 20)), TWO_LAYERS.transfers)
    assert run(graph, *early).peak_bytes == 17 + 5 + 7


REDUCTION = TaskGraph(
    (Compute("writes half", 1.0, 10), Compute("writes the rest", 1.0, 10), Compute("other", 1.0, 12)),
    (transfer("reduce", 1.5, writers=(0, 1), input_bytes=6, output_bytes=2),),
)


def test_an_input_is_held_from_its_first_writer_until_its_wait() -> None:
    late = run(REDUCTION, Run(0), Run(1), Launch((0,)), Run(2), Wait((0,)))
    assert (late.makespan, late.exposed, late.peak_bytes) == (3.5, 0.5, 12 + 6 + 2)
    soon = run(REDUCTION, Run(0), Run(1), Launch((0,)), Wait((0,)), Run(2))
    assert (soon.makespan, soon.exposed, soon.peak_bytes) == (4.5, 1.5, 10 + 6 + 2)


SCRATCHED = TaskGraph(
    REDUCTION.compute, (transfer("reduce", 1.5, writers=(0, 1), input_bytes=6, output_bytes=2, scratch_bytes=5),)
)


def test_scratch_is_held_between_launch_and_wait_only() -> None:
    beside = (Run(0), Run(1), Launch((0,)), Run(2), Wait((0,)))
    at_once = (Run(0), Run(1), Launch((0,)), Wait((0,)), Run(2))
    assert run(SCRATCHED, *beside).peak_bytes == 12 + 6 + 2 + 5
    assert run(SCRATCHED, *at_once).peak_bytes == 10 + 6 + 2 + 5
    first, *others = SCRATCHED.compute
    large_before = TaskGraph((replace(first, live_bytes=40), *others), SCRATCHED.transfers)
    large_after = TaskGraph((first, others[0], replace(others[1], live_bytes=40)), SCRATCHED.transfers)
    assert run(large_before, *at_once).peak_bytes == 40 + 6
    assert run(large_after, *at_once).peak_bytes == 40 + 2


def test_of_memories_that_are_apart_each_is_taken_as_large_as_it_once_has_to_be() -> None:
    gather = transfer("gather", 1.0, readers=(2,), output_bytes=9)
    together = TaskGraph(SCRATCHED.compute, (*SCRATCHED.transfers, gather))
    program = (Run(0), Run(1), Launch((0,)), Wait((0,)), Launch((1,)), Wait((1,)), Run(2))
    assert run(together, *program).peak_bytes == max(10 + 6 + 2 + 5, 12 + 2 + 9)
    assert run(replace(together, apart=True), *program).peak_bytes == (12 + 2 + 9) + (6 + 5)


def test_memory_does_not_depend_on_durations() -> None:
    slow = TaskGraph(REDUCTION.compute, (transfer("reduce", 99.0, writers=(0, 1), input_bytes=6, output_bytes=2),))
    program = (Run(0), Run(1), Launch((0,)), Run(2), Wait((0,)))
    assert run(slow, *program).peak_bytes == run(REDUCTION, *program).peak_bytes


def test_lanes_share_the_wire_equally() -> None:
    graph = TaskGraph(
        (Compute("task", 1.0),),
        (
            transfer("short", 2.0, readers=(0,), lane="a"),
            transfer("long", 3.0, readers=(0,), lane="b"),
        ),
    )
    timeline = run(graph, Launch((0,)), Launch((1,)), Wait((0,)), Wait((1,)), Run(0))
    assert [(span.start, span.stop) for span in timeline.transfers] == [(0.0, 4.0), (0.0, 5.0)]


def test_what_goes_over_other_links_then_goes_one_after_another_beside_the_wire() -> None:
    reductions = [
        Transfer(f"reduce {i}", 0.0, 2.0, writers=(0,), then_latency=1.0, then_wire_time=2.0, merge="all")
        for i in (0, 1)
    ]
    graph = TaskGraph((Compute("task", 1.0),), tuple(reductions))
    alone = run(graph, Run(0), Launch((0,)), Launch((1,)), Wait((0,)), Wait((1,)))
    assert [span.stop for span in alone.transfers] == [1 + 2 + 3, 1 + 2 + 3 + 3]
    assert (alone.exposed, alone.communication) == (8.0, 10.0)
    together = run(graph, Run(0), Launch((0, 1)), Wait((0, 1)))
    assert [span.stop for span in together.transfers] == [1 + 4 + 1 + 4]


def test_a_transfer_that_loads_the_device_slows_the_computation_beside_it() -> None:
    graph = TaskGraph((Compute("task", 4.0),), (transfer("reduce", 2.0, writers=(0,), load=0.5),) * 1)
    assert run(graph, Run(0), Launch((0,)), Wait((0,))).slowdown == 0.0
    graph = TaskGraph(
        (Compute("first", 4.0), Compute("second", 1.0)), (transfer("gather", 2.0, readers=(1,), load=0.5),)
    )
    timeline = run(graph, Launch((0,)), Run(0), Wait((0,)), Run(1))
    assert (timeline.makespan, timeline.slowdown, timeline.exposed) == (6.0, 1.0, 0.0)


def test_a_transfer_that_computation_slows_takes_longer_beside_it_only() -> None:
    graph = TaskGraph(
        (Compute("first", 4.0), Compute("second", 1.0)), (transfer("gather", 3.0, readers=(1,), stretch=2.0),)
    )
    timeline = run(graph, Launch((0,)), Run(0), Wait((0,)), Run(1))
    assert (timeline.makespan, timeline.slowdown, timeline.exposed) == (6.0, 0.0, 1.0)
    assert run(graph, Launch((0,)), Wait((0,)), Run(0), Run(1)).makespan == 8.0


def test_a_transfer_takes_longer_where_the_wire_is_idle_when_it_is_launched() -> None:
    gathers = [transfer(f"gather {i}", 2.0, readers=(1,), lane=f"lane {i}", wakeup=3.0) for i in range(2)]
    graph = TaskGraph((Compute("first", 4.0), Compute("second", 1.0)), tuple(gathers))
    at_once = run(graph, Launch((0,)), Launch((1,)), Run(0), Wait((0,)), Wait((1,)), Run(1))
    after_one_another = run(graph, Launch((0,)), Wait((0,)), Launch((1,)), Wait((1,)), Run(0), Run(1))
    assert at_once.makespan == 7.0 + 1.0
    assert after_one_another.makespan == 2 * 5.0 + 4.0 + 1.0


def test_a_launch_keeps_from_computing_while_what_is_in_flight_goes_on() -> None:
    gathers = [transfer(f"gather {i}", 2.0, readers=(i,), load=0.5, launch=1.0) for i in range(2)]
    graph = TaskGraph((Compute("first", 4.0), Compute("second", 1.0)), tuple(gathers))
    timeline = run(graph, Launch((0,)), Launch((1,)), Wait((0,)), Run(0), Wait((1,)), Run(1))
    assert [(span.start, span.stop) for span in timeline.transfers] == [(0.0, 2.0), (2.0, 4.0)]
    assert timeline.runs == ((2.0, 7.0), (7.0, 8.0))  # the first loses half of two seconds to the second gather
    assert (timeline.exposed, timeline.slowdown) == (0.0, 2.0 + 1.0)


def test_nothing_begins_before_the_host_has_launched_it() -> None:
    graph = TaskGraph(
        (Compute("first", 1.0, issue=2.0), Compute("second", 1.0)),
        (transfer("gather", 3.0, readers=(1,), issue=0.5, call=1.5),),
    )
    timeline = run(graph, Run(0), Launch((0,)), Wait((0,)), Run(1))
    assert timeline.runs == ((0.0, 2.0), (7.0, 8.0))
    assert [(span.start, span.stop) for span in timeline.transfers] == [(4.0, 7.0)]
    assert (timeline.compute, timeline.starved, timeline.exposed, timeline.slowdown) == (2.0, 3.0, 3.0, 0.0)


def test_a_host_that_is_ahead_takes_no_time() -> None:
    graph = TaskGraph(
        (Compute("long", 9.0, issue=1.0), Compute("short", 1.0, issue=3.0)),
        (transfer("reduce", 2.0, writers=(0,), call=4.0),),
    )
    timeline = run(graph, Run(0), Launch((0,)), Run(1), Wait((0,)))
    assert (timeline.makespan, timeline.starved) == (9.0 + 2.0, 0.0)


def test_nothing_is_computed_before_what_the_host_does_first() -> None:
    graph = TaskGraph(
        (Compute("first", 5.0), Compute("second", 4.0)), (transfer("reduce", 1.0, writers=(1,)),), before=3.0
    )
    timeline = run(graph, Run(0), Run(1), Launch((0,)), Wait((0,)))
    assert timeline.runs == ((3.0, 8.0), (8.0, 12.0))
    assert (timeline.starved, timeline.makespan) == (3.0, 13.0)


def test_the_host_calls_merged_transfers_once() -> None:
    parts = [Transfer(f"gather {i}", 0.0, 1.0, readers=(0,), merge="all", issue=0.5, call=4.0) for i in range(2)]
    timeline = run(TaskGraph((Compute("reads", 1.0),), tuple(parts)), Launch((0, 1)), Wait((0, 1)), Run(0))
    assert timeline.starved == 4.0 + 2 * 0.5


def test_of_what_has_come_nothing_is_left_to_carry() -> None:
    machine = Machine(Lifetimes(TWO_LAYERS))
    for instruction in (Launch((0,)), Launch((1,)), Wait((0,)), Run(0)):
        machine.execute(instruction)
    assert (machine.backlog(0), machine.backlog(1), machine.backlog()) == (0.0, 2.0, 2.0)


def test_the_tail_begins_when_the_last_launch_is_over() -> None:
    graph = TaskGraph((Compute("writes", 1.0),), (transfer("reduce", 3.0, writers=(0,), launch=0.5),))
    timeline = run(graph, Run(0), Launch((0,)), Wait((0,)))
    assert (timeline.makespan, timeline.tail) == (1.0 + 3.0, 2.5)


def test_merged_transfers_are_launched_one_after_another() -> None:
    parts = [Transfer(f"gather {i}", 0.0, 3.0, readers=(0,), merge="gathers", launch=0.5) for i in range(2)]
    timeline = run(TaskGraph((Compute("reads", 1.0),), tuple(parts)), Launch((0, 1)), Wait((0, 1)), Run(0))
    assert (timeline.exposed, timeline.slowdown) == (5.0, 1.0)


def test_merged_transfers_pay_one_latency() -> None:
    parts = [Transfer(f"gather {i}", 2.0, 1.0, readers=(i,), merge="gathers") for i in range(2)]
    graph = TaskGraph((Compute("first", 1.0), Compute("second", 1.0)), tuple(parts))
    together = run(graph, Launch((0, 1)), Wait((0, 1)), Run(0), Run(1))
    apart = run(graph, Launch((0,)), Launch((1,)), Wait((0,)), Run(0), Wait((1,)), Run(1))
    assert (together.makespan, together.communication) == (6.0, 4.0)
    assert (apart.makespan, apart.communication) == (7.0, 6.0)


KEEPABLE = TaskGraph(
    (Compute("forward", 1.0), Compute("loss", 1.0, 50), Compute("backward", 1.0)),
    (
        transfer("gather", 1.0, readers=(0,), output_bytes=5),
        transfer("gather again", 1.0, readers=(2,), output_bytes=5, repeats=0),
    ),
)


def test_a_kept_output_saves_a_transfer_and_is_held_in_between() -> None:
    kept = run(KEEPABLE, Launch((0,)), Wait((0,)), Run(0), Run(1), Run(2), kept=(1,))
    assert (kept.makespan, kept.communication, kept.peak_bytes) == (4.0, 1.0, 55)
    again = run(KEEPABLE, Launch((0,)), Wait((0,)), Run(0), Run(1), Launch((1,)), Wait((1,)), Run(2))
    assert (again.makespan, again.communication, again.peak_bytes) == (5.0, 2.0, 50)


@pytest.mark.parametrize(
    ("graph", "instructions", "problem"),
    [
        (TWO_LAYERS, (Run(0),), "'first' reads 'gather 1' before its wait"),
        (TWO_LAYERS, (Launch((0,)), Run(0)), "'first' reads 'gather 1' before its wait"),
        (TWO_LAYERS, (Run(1),), "task 0 is next, not 1"),
        (TWO_LAYERS, (Wait((0,)),), "gather 1: waited for, but not in flight"),
        (TWO_LAYERS, (Launch((0,)), Launch((0,))), "gather 1: launched twice"),
        (TWO_LAYERS, (Launch((0, 1)),), r"gather 1 \+ gather 2: these may not share a collective"),
        (TWO_LAYERS, (Launch(()),), "of no transfers"),
        (TWO_LAYERS, (Launch((0,)), Wait((0,)), Run(0)), "the program ends before 'second' has run"),
        (REDUCTION, (Run(0), Launch((0,))), "reduce: launched before 'writes the rest' has written"),
        (REDUCTION, (Run(0), Run(1), Run(2), Launch((0,))), "the program ends without a wait for 'reduce'"),
    ],
)
def test_a_program_that_breaks_a_rule_is_refused(graph: TaskGraph, instructions: tuple, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        run(graph, *instructions)


def test_only_what_repeats_another_can_be_left_out() -> None:
    with pytest.raises(ValueError, match="'gather' can't be left out"):
        run(KEEPABLE, Run(0), kept=(0,))
