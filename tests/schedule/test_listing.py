"""One walk of the list scheduler."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_graphs import any_graphs

from vescale_compile.schedule import Compute, Instruction, Launch, TaskGraph, Transfer
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.listing import Frame, Listed, list_schedule
from vescale_compile.schedule.policies import POLICIES, Policy, gathers_first

UNLIMITED = 1 << 62


def listed(
    graph: TaskGraph, ahead: int, *, room: int = UNLIMITED, policy: Policy = gathers_first, patient: bool = True
) -> Listed:
    frame = Frame.build(Lifetimes(graph), ())
    limits = frame.limits(sum(map(max, frame.least)) + room, 0.5)
    assert limits is not None
    return list_schedule(frame, limits, policy, ahead=ahead, patient=patient, limit=math.inf)


def program(found: Listed) -> list[Instruction] | None:
    return found.machine and found.machine.instructions


@given(any_graphs(), st.integers(0, 6), st.sampled_from(POLICIES), st.booleans(), st.integers(0, 4))
@settings(max_examples=200, derandomize=True)
def test_a_walk_that_nothing_held_back_is_the_same_with_more_gathers_ahead(
    graph: TaskGraph, room: int, policy: Policy, patient: bool, ahead: int
) -> None:
    few = listed(graph, ahead, room=room, policy=policy, patient=patient)
    assume(not few.held_back)
    many = listed(graph, UNLIMITED, room=room, policy=policy, patient=patient)
    assert program(few) == program(many)


@pytest.mark.parametrize(("ahead", "held_back"), [(1, True), (3, False)])
def test_a_gather_that_may_not_be_launched_yet_holds_a_walk_back(ahead: int, held_back: bool) -> None:
    gathers = tuple(Transfer(f"g{i}", 0.0, 0.1, readers=(i,), output_bytes=1) for i in range(4))
    found = listed(TaskGraph(tuple(Compute(f"c{i}", 10.0) for i in range(4)), gathers), ahead)
    assert found.machine is not None and found.held_back == held_back
    assert sum(isinstance(each, Launch) for each in found.machine.instructions) == 4
