"""The verifier on reductions: what is right passes, and each way of breaking it is caught and named."""

from dataclasses import replace

import pytest
import torch
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


def test_a_reduced_gradient_may_be_cast_on_its_way_out():
    graph = Graph()
    reduced = graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    cast = graph.call(aten._to_copy.default, reduced)
    graph.verify([cast], replace(context(Part.BACKWARD, reduced=(0,)), returned={0: 0}))


def test_memory_that_nothing_was_reduced_to_is_returned():
    graph = Graph()
    graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    backward = replace(context(Part.BACKWARD, reduced=(0,)), returned={0: 0})
    with pytest.raises(GraphError, match=r"reduced gradients of unit layers\.0 are read before anything was written"):
        graph.verify([graph.buffer(Use.REDUCED)], backward)


def test_reading_what_was_scratch_of_a_reduction():
    graph = Graph()
    buffers = graph.launch_reduction_of(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    reduced = graph.wait_reduction_of(buffers)
    with pytest.raises(GraphError, match=r"scratch of a reduction of unit layers\.0 are read after they were reduced"):
        graph.verify([reduced, graph.read(buffers[2])], context(Part.BACKWARD, reduced=(0,)))


def test_reducing_gradients_that_another_tenant_of_their_slot_overwrote():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True))
    read = graph.read(graph.gather(graph.buffer(unit=1, slot=True)))
    with pytest.raises(GraphError, match=r"reads the gradients of unit layers\.0, whose memory holds the gathered"):
        graph.verify([graph.reduce(gradients), read], context(Part.BACKWARD, reduced=(0,)))


def test_a_reduction_of_less_than_a_unit():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    gradients.meta["val"] = gradients.meta["val"][1:]
    with pytest.raises(GraphError, match=r"gradients of layers\.0 have 7 elements, and the unit has 8"):
        graph.verify([graph.reduce(gradients)], context(Part.BACKWARD, reduced=(0,)))


def test_a_reduction_over_the_replicas_of_another_unit():
    graph = Graph()
    buffers = graph.launch_reduction_of(graph.write_gradient(graph.buffer(Use.GRADIENTS)), replicas="1")
    with pytest.raises(GraphError, match=r"marked as of unit layers\.0 is of replicas '1', not ''"):
        graph.verify([graph.wait_reduction_of(buffers)], context(Part.BACKWARD, reduced=(0,)))


@pytest.mark.parametrize(("dtype", "replicas"), [(torch.bfloat16, ""), (torch.float32, "1")])
def test_sharing_a_reduction_with_one_of_another_dtype_or_over_other_replicas(dtype, replicas):
    graph = Graph()
    first, second = (graph.write_gradient(graph.buffer(Use.GRADIENTS, unit)) for unit in range(2))
    second.meta["val"] = second.meta["val"].to(dtype)
    graph.launch_reduction_of(first, with_next=True)
    graph.launch_reduction_of(second, replicas=replicas)
    with pytest.raises(GraphError, match="shares a collective with the next launch, which is of another kind"):
        graph.verify([], context(Part.BACKWARD, reduced=(0, 1)))


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


def test_parameters_that_are_returned_where_the_gradient_of_their_unit_belongs():
    graph = Graph()
    reduced = graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    backward = replace(context(Part.BACKWARD, reduced=(0,)), returned={0: 0})
    with pytest.raises(GraphError, match=r"result 0 is not the reduced gradient of unit layers\.0"):
        graph.verify([graph.gather(graph.buffer()), reduced], backward)


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


def test_nothing_else_of_it_may_be_returned_in_flight():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    shard = graph.leave_reduction(gradients)
    with pytest.raises(GraphError, match=r"the gradients of unit layers\.0 are read before the wait"):
        graph.verify([shard, gradients], context(Part.BACKWARD, reduced=(0,)))


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
    with pytest.raises(GraphError, match=r"in flight: gradients of unit layers\.0"):
        graph.verify([shard], context(Part.BACKWARD, reduced=(0,)))


def test_leaving_a_reduction_in_flight_in_another_graph_than_the_backward():
    graph = Graph()
    shard = graph.leave_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    with pytest.raises(GraphError, match="only a backward leaves reductions in flight"):
        graph.verify([shard], context(Part.FORWARD))
