"""Predictions of graphs whose host takes time, and of the steps that they are parts of."""

from dataclasses import replace

import pytest

from vescale_compile.passes.prediction import Phase, Prediction, predict, seconds_one_after_another
from vescale_compile.schedule import Compute, Launch, Run, Schedule, TaskGraph, Transfer, Wait, lower_bound, simulate

GATHER = Transfer("gather", 0.0, 3.0, readers=(0,), issue=0.5, call=1.5)
HALF = TaskGraph((Compute("computes", 4.0, issue=1.0),), (GATHER,))
IN_ORDER = Schedule((Launch((0,)), Wait((0,)), Run(0)))


def predicted(before: float, after: float) -> Prediction:
    graph = replace(HALF, before=before, after=after)
    return predict(graph, simulate(graph, IN_ORDER), lower_bound(graph), lower_bound(graph.fed()))


def test_what_the_host_does_before_a_graph_delays_all_of_it() -> None:
    found = predicted(before=10.0, after=0.0)
    assert found.seconds == 10.0 + 2.0 + 3.0 + 4.0
    assert (found.compute, found.exposed, found.starved) == (4.0, 3.0, 12.0)


def test_what_the_host_does_after_a_graph_counts_where_it_ends_later_than_the_device() -> None:
    ended = predicted(0.0, 0.0)
    assert ended.issued == 2.0 + 1.0
    assert predicted(0.0, after=6.0) == replace(ended, issued=9.0, least_issued=9.0)
    assert predicted(0.0, after=10.0).seconds == 13.0


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (5.0, 0.0), (0.0, 20.0)])
def test_a_graph_takes_no_less_than_its_bounds(before: float, after: float) -> None:
    found = predicted(before, after)
    assert found.least <= found.seconds
    assert found.least_issued <= found.issued
    assert found.least_fed == 3.0 + 4.0 <= found.seconds - found.starved


def test_a_host_that_has_launched_all_goes_on_while_the_device_computes() -> None:
    forward = Phase(alone=10.0, fed=9.0, issued=2.0)
    backward = Phase(alone=7.0, fed=5.0, issued=4.0)
    assert seconds_one_after_another([forward]) == 10.0
    assert seconds_one_after_another([forward, backward]) == 10.0 + 5.0  # not 7: the host had begun when 2 were over


def test_a_device_that_is_ahead_waits_for_its_host() -> None:
    forward = Phase(alone=10.0, fed=1.0, issued=10.0)
    backward = Phase(alone=7.0, fed=5.0, issued=4.0)
    assert seconds_one_after_another([forward, backward]) == 10.0 + 7.0
    assert seconds_one_after_another([forward, replace(backward, issued=20.0)]) == 10.0 + 20.0
