"""The verifier on reductions: what is right passes, and each way of breaking it is caught and named."""

from dataclasses import replace

import pytest
from handmade import Graph, aten, context

from vescale_compile.passes.context import GraphError, Part, Use
from vescale_compile.runtime import leaving


def test_a_correct_backward_passes():
    graph = Graph()
    graph.verify(
        [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))], context(Part.BACKWARD, reduced=(0,))
    )


def test_a_gradient_written_after_its_reduction_was_launched():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    reduced = graph.reduce(gradients)
    graph.write_gradient(gradients)
    with pytest.raises(GraphError, match="whose reduction was launched before"):
        graph.verify([reduced], context(Part.BACKWARD, reduced=(0,)))


def test_a_gradient_packed_into_another_buffer_than_the_one_that_is_reduced():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    reduced = graph.reduce(graph.call(aten.cat.default, [gradients]))
    with pytest.raises(GraphError, match="what is reduced is not the buffer that gradients are written to"):
        graph.verify([reduced], context(Part.BACKWARD, reduced=(0,)))


def test_a_reduced_gradient_copied_on_its_way_out():
    graph = Graph()
    reduced = graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    with pytest.raises(GraphError, match=r"reduced gradients of unit layers\.0 are moved or computed with"):
        graph.verify([graph.call(aten.clone.default, reduced)], context(Part.BACKWARD, reduced=(0,)))


def verify_returned(*outputs: int) -> None:
    """Two units' gradients, returned where the program has those of units 0 and 1."""
    graph = Graph()
    reduced = [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS, unit))) for unit in range(2)]
    backward = replace(context(Part.BACKWARD, reduced=(0, 1)), returned={0: 0, 1: 1})
    graph.verify([reduced[unit] for unit in outputs], backward)


def test_gradients_returned_in_each_others_place():
    verify_returned(0, 1)
    with pytest.raises(GraphError, match=r"result 0 is not the reduced gradient of unit layers\.0"):
        verify_returned(1, 0)


def test_a_reduced_gradient_that_is_not_returned():
    with pytest.raises(GraphError, match=r"result 1 is not the reduced gradient of unit layers\.1"):
        verify_returned(0, 0)


def test_units_that_reduce_each_others_gradients():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, 1))
    shard = graph.reduce(gradients, unit=0)
    with pytest.raises(GraphError, match=r"gradients of unit layers\.1 are in a collective of unit layers\.0"):
        graph.verify([shard], context(Part.BACKWARD, reduced=(0,)))


@pytest.mark.parametrize("times", [0, 2])
def test_a_gradient_that_is_not_reduced_exactly_once(times):
    graph = Graph()
    reduced = [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS))) for _ in range(times)]
    with pytest.raises(GraphError, match=rf"the gradient of unit layers\.0 is reduced {times} times, once is right"):
        graph.verify(reduced or [graph.shards[0]], context(Part.BACKWARD, reduced=(0,)))


def test_a_joint_graph_that_reduced_a_gradient_twice():
    graph = Graph()
    reduced = [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS))) for _ in range(2)]
    with pytest.raises(GraphError, match="reduced 2 times"):
        graph.verify(reduced, context(Part.BACKWARD, reduced=(0, 0)))


def test_a_reduction_may_be_in_flight_when_the_backward_ends():
    graph = Graph()
    shard = graph.leave_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    graph.verify([shard], context(Part.BACKWARD, reduced=(0,)))


def test_its_result_may_be_cast_when_it_is_read():
    graph = Graph()
    shard = graph.leave_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    result = graph.buffer(Use.REDUCED)
    graph.call(leaving.cast_when_read, shard, result, 0)
    graph.verify([result], context(Part.BACKWARD, reduced=(0,)))


def test_casting_when_it_is_read_what_was_waited_for():
    graph = Graph()
    shard = graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    result = graph.buffer(Use.REDUCED)
    graph.call(leaving.cast_when_read, shard, result, 0)
    with pytest.raises(GraphError, match=r"of unit layers\.0 are read, which were not left in flight"):
        graph.verify([result], context(Part.BACKWARD, reduced=(0,)))


def test_computing_with_the_result_of_a_reduction_that_was_left_in_flight():
    graph = Graph()
    shard = graph.leave_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    with pytest.raises(GraphError, match=r"reduced gradients of unit layers\.0 are read before the wait"):
        graph.verify([graph.read(shard)], context(Part.BACKWARD, reduced=(0,)))


def test_a_slot_given_away_though_a_reduction_was_left_in_flight_on_it():
    graph = Graph()
    shard = graph.leave_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    gathered = graph.read(graph.gather(graph.buffer(unit=1, slot=True)))
    with pytest.raises(GraphError, match="get memory on which a collective is in flight"):
        graph.verify([shard, gathered], context(Part.BACKWARD, reduced=(0,)))


def test_gradients_written_though_a_reduction_was_left_in_flight_there():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True))
    shard = graph.leave_reduction(gradients)
    graph.write_gradient(gradients)
    with pytest.raises(GraphError, match="whose reduction was launched before"):
        graph.verify([shard], context(Part.BACKWARD, reduced=(0,)))


def test_leaving_a_reduction_in_flight_in_another_graph_than_the_backward():
    graph = Graph()
    shard = graph.leave_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    with pytest.raises(GraphError, match="only a backward leaves reductions in flight"):
        graph.verify([shard], context(Part.FORWARD))
