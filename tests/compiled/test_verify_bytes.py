"""The verifier on copies, slots and budgets: each way of breaking a graph is caught and named."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from handmade import WORLD, Graph, S, aten, context

from vescale_compile.passes.context import Copied, GraphError, Part, Use
from vescale_compile.runtime import ops
from vescale_compile.runtime.unshard import ParamView


@pytest.mark.parametrize("target", [aten.clone.default, aten._to_copy.default])
def test_moving_gathered_parameters(target):
    graph = Graph()
    moved = graph.call(target, graph.call(aten.view.default, graph.gather(graph.buffer()), [2, 4]))
    message = rf"gathered parameters of unit layers\.0 are moved by {target}, and not by the program"
    with pytest.raises(GraphError, match=message):
        graph.verify([graph.read(moved)], context(Part.FORWARD))


def test_concatenating_gathered_parameters():
    graph = Graph()
    joined = graph.call(aten.cat.default, [graph.gather(graph.buffer(unit=unit)) for unit in range(2)])
    with pytest.raises(GraphError, match=r"are moved by aten\.cat\.default, and not by the program"):
        graph.verify([joined], context(Part.FORWARD))


def test_the_program_may_move_what_it_reads_but_no_pass_once_more():
    for clones in (1, 2):
        graph, forward = Graph(), context(Part.FORWARD)
        forward.moved = Counter({(0, "aten.clone.default"): 1})
        parameters = graph.gather(graph.buffer())
        outputs = [graph.call(aten.clone.default, parameters) for _ in range(clones)]
        if clones == 1:
            graph.verify(outputs, forward)
        else:
            with pytest.raises(GraphError, match="and not by the program"):
                graph.verify(outputs, forward)


def verify_copy(mark: object) -> None:
    graph = Graph()
    computed = graph.call(aten.relu.default, graph.shards[1])
    gradients = graph.buffer(Use.GRADIENTS)
    graph.call(aten.copy_.default, graph.call(aten.view.default, gradients, [WORLD * S]), computed, mark=mark)
    graph.verify([graph.reduce(gradients)], context(Part.BACKWARD, reduced=(0,)))


def test_a_gradient_that_is_copied_and_not_counted():
    with pytest.raises(GraphError, match=r"a gradient of unit layers\.0 is copied into its place, and nothing counts"):
        verify_copy(None)


def verify_places(*written: tuple[int, int], views: tuple[ParamView, ...]) -> None:
    graph, backward = Graph(), context(Part.BACKWARD, reduced=(0,))
    backward = replace(backward, units=(replace(backward.units[0], views=views[:1], others=views[1:]),))
    gradients = graph.buffer(Use.GRADIENTS)
    for start, stop in written:
        place = graph.call(aten.slice.Tensor, gradients, 0, start, stop)
        place.meta["val"] = gradients.meta["val"][start:stop]
        graph.call(aten.fill_.Scalar, place, 0)
    graph.verify([graph.reduce(gradients)], backward)


PARAMETERS = (ParamView(0, (3,), True), ParamView(4, (2, 2), True))


def test_padding_need_not_be_written():
    verify_places((4, 8), (0, 3), views=PARAMETERS)


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ([(4, 8)], "before element 0 of them is written, which is of the parameter at 0 to 3"),
        ([(0, 3), (6, 8)], "before element 4 of them is written, which is of the parameter at 4 to 8"),
        ([(0, 3), (4, 7)], "before element 7 of them is written, which is of the parameter at 4 to 8"),
    ],
    ids=["none", "not its beginning", "not its end"],
)
def test_a_gradient_that_is_reduced_before_it_is_written_where_it_belongs(written, missing):
    with pytest.raises(GraphError, match=rf"gradients of unit layers\.0 are reduced, or returned, {missing}"):
        verify_places(*written, views=PARAMETERS)


def test_a_gradient_that_is_written_over_another():
    with pytest.raises(GraphError, match=r"a gradient of unit layers\.0 is written where one was written before"):
        verify_places((0, 3), (4, 8), (2, 3), views=PARAMETERS)


@pytest.mark.parametrize("written_before", [True, False])
def test_a_gradient_is_only_added_to_what_was_written_before(written_before):
    graph = Graph()
    gradients = graph.buffer(Use.GRADIENTS)
    if written_before:
        graph.write_gradient(gradients)
    factors = [graph.call(aten.view.default, shard, [2, 2]) for shard in graph.shards]
    graph.call(ops.matmul_into, graph.call(aten.view.default, gradients, [2, 4]), *factors, True)
    outputs = [graph.reduce(gradients)]
    if written_before:
        graph.verify(outputs, context(Part.BACKWARD, reduced=(0,)))
    else:
        with pytest.raises(GraphError, match="before element 0 of them is written"):
            graph.verify(outputs, context(Part.BACKWARD, reduced=(0,)))


def test_a_copy_that_is_counted_is_right():
    verify_copy(Copied(0, "computed elsewhere"))


def test_a_buffer_that_is_longer_than_its_slot():
    graph = Graph()
    graph.slot.meta["val"] = graph.slot.meta["val"][:-1]
    with pytest.raises(GraphError, match=r"layers\.0, 8 elements, do not fit into their slot of 7"):
        graph.verify([graph.read(graph.gather(graph.buffer(slot=True)))], context(Part.FORWARD))


def verify_within(budget: int) -> None:
    graph = Graph()
    outputs = [graph.read(graph.gather(graph.buffer()))]
    graph.verify(outputs, replace(context(Part.FORWARD), memory_budget=budget))


def test_a_graph_that_takes_more_than_the_budget():
    with pytest.raises(GraphError, match=r"memory_budget is 1 B, but a step takes (\d+) B with its slots") as error:
        verify_within(1)
    taken = int(re.search(r"takes (\d+) B", str(error.value))[1])
    verify_within(taken)
    with pytest.raises(GraphError, match="but a step takes"):
        verify_within(taken - 1)
