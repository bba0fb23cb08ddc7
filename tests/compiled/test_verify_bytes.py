"""The verifier on copies, slots and budgets: each way of breaking a graph is caught and named."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from handmade import WORLD, Graph, S, aten, context
from torch import fx

from vescale_compile.passes.context import Copied, GraphError, Lowering, Part, Use
from vescale_compile.passes.summary import Peak, Summary
from vescale_compile.runtime import ops
from vescale_compile.runtime.model import Beside
from vescale_compile.runtime.pool import SlotSpec
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


def verify_copy(mark: object = None, *, lowering: Lowering = Lowering.EAGER, read_elsewhere: bool = False) -> None:
    graph = Graph()
    computed = graph.call(aten.relu.default, graph.shards[1])
    if read_elsewhere:
        graph.read(computed)
    gradients = graph.buffer(Use.GRADIENTS)
    graph.call(aten.copy_.default, graph.call(aten.view.default, gradients, [WORLD * S]), computed, mark=mark)
    graph.verify([graph.reduce(gradients)], replace(context(Part.BACKWARD, reduced=(0,)), lowering=lowering))


NOT_COUNTED = r"a gradient of unit layers\.0 is copied into its place, and nothing counts"


def test_a_gradient_that_is_copied_and_not_counted():
    with pytest.raises(GraphError, match=NOT_COUNTED):
        verify_copy()


def test_what_the_kernel_that_computes_a_gradient_stores_in_its_place_is_no_copy():
    verify_copy(lowering=Lowering.INDUCTOR)


def test_a_gradient_that_is_read_elsewhere_too_is_a_copy_where_it_belongs():
    with pytest.raises(GraphError, match=NOT_COUNTED):
        verify_copy(lowering=Lowering.INDUCTOR, read_elsewhere=True)


def verify_places(*written: tuple[int, int], views: tuple[ParamView, ...], reduced: tuple[int, ...] = (0,)) -> None:
    graph, backward = Graph(), context(Part.BACKWARD, reduced=reduced)
    backward = replace(backward, units=(replace(backward.units[0], views=views[:1], others=views[1:]),))
    gradients = graph.buffer(Use.GRADIENTS)
    for start, stop in written:
        place = graph.call(aten.slice.Tensor, gradients, 0, start, stop)
        place.meta["val"] = gradients.meta["val"][start:stop]
        graph.call(aten.fill_.Scalar, place, 0)
    graph.verify([graph.reduce(gradients) if reduced else gradients], backward)


PARAMETERS = (ParamView(0, (3,), True), ParamView(4, (2, 2), True))


def test_padding_need_not_be_written():
    verify_places((4, 8), (0, 3), views=PARAMETERS)


@pytest.mark.parametrize("reduced", [(0,), ()], ids=["reduced", "returned"])
@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ([(4, 8)], "before element 0 of them is written, which is of the parameter at 0 to 3"),
        ([(0, 3), (6, 8)], "before element 4 of them is written, which is of the parameter at 4 to 8"),
        ([(0, 3), (4, 7)], "before element 7 of them is written, which is of the parameter at 4 to 8"),
    ],
    ids=["none", "not its beginning", "not its end"],
)
def test_a_gradient_that_is_reduced_or_returned_before_it_is_written_where_it_belongs(written, missing, reduced):
    with pytest.raises(GraphError, match=rf"gradients of unit layers\.0 are reduced, or returned, {missing}"):
        verify_places(*written, views=PARAMETERS, reduced=reduced)


def test_a_gradient_that_is_written_over_another():
    with pytest.raises(GraphError, match=r"a gradient of unit layers\.0 is written where one was written before"):
        verify_places((0, 3), (4, 8), (2, 3), views=PARAMETERS)


def add_product(graph: Graph, gradients: fx.Node) -> None:
    factors = [graph.call(aten.view.default, shard, [2, 2]) for shard in graph.shards]
    graph.call(ops.matmul_into, graph.call(aten.view.default, gradients, [2, 4]), *factors, True)


def scatter(graph: Graph, gradients: fx.Node, accumulate: bool = True) -> None:
    graph.call(aten.index_put_.default, gradients, [graph.shards[0]], graph.shards[1], accumulate)


@pytest.mark.parametrize("add", [add_product, scatter])
@pytest.mark.parametrize("written_before", [True, False])
def test_a_gradient_is_only_added_to_what_was_written_before(
    written_before: bool, add: Callable[[Graph, fx.Node], None]
):
    graph = Graph()
    gradients = graph.buffer(Use.GRADIENTS)
    if written_before:
        graph.write_gradient(gradients)
    add(graph, gradients)
    outputs = [graph.reduce(gradients)]
    if written_before:
        graph.verify(outputs, context(Part.BACKWARD, reduced=(0,)))
    else:
        with pytest.raises(GraphError, match="before element 0 of them is written"):
            graph.verify(outputs, context(Part.BACKWARD, reduced=(0,)))


def test_rows_that_take_the_place_of_a_gradient_are_written_over_it():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    scatter(graph, gradients, accumulate=False)
    with pytest.raises(GraphError, match="is written where one was written before"):
        graph.verify([graph.reduce(gradients)], context(Part.BACKWARD, reduced=(0,)))


def test_a_copy_that_is_counted_is_right():
    verify_copy(Copied(0, "computed elsewhere"))


def test_a_buffer_that_is_longer_than_its_slot():
    graph = Graph()
    graph.slot.meta["val"] = graph.slot.meta["val"][:-1]
    with pytest.raises(GraphError, match=r"layers\.0, 8 elements, do not fit into their slot of 7"):
        graph.verify([graph.read(graph.gather(graph.buffer(slot=True)))], context(Part.FORWARD))


STANDING = 4 * 2 * S  # the shards
PEAK = 4 * (3 * WORLD * S + S)  # what is gathered, and what reads it; a slot that nothing uses, and such a shard
SLOT = SlotSpec(WORLD * S, torch.float32, torch.device("cpu"))
FULLER = Summary(0, (), (), (), Peak("add", activations=900), 0, prediction=None)


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ({}, STANDING + PEAK),
        ({"beside": Beside(gradients=50)}, STANDING + PEAK + 50),
        ({"slots": {Part.BACKWARD: (SLOT,)}}, STANDING + PEAK + SLOT.nbytes),
        ({"slots": {Part.BACKWARD: (SLOT,)}, "beside": Beside(one_of_many=True)}, STANDING + PEAK + 2 * SLOT.nbytes),
        ({"summaries": {Part.BACKWARD: FULLER}}, STANDING + 900),
    ],
    ids=["graph", "beside", "slots", "turns", "another graph"],
)
def test_a_step_takes_the_fullest_moment_of_its_graphs_beside_slots_and_what_stands(found, taken):
    for budget in (taken, taken - 1):
        graph = Graph()
        outputs = [graph.read(graph.gather(graph.buffer()))]
        forward = replace(context(Part.FORWARD), memory_budget=budget, **found)
        if budget == taken:
            graph.verify(outputs, forward)
        else:
            with pytest.raises(GraphError, match=rf"memory_budget is {budget} B, but a step takes {taken} B with its"):
                graph.verify(outputs, forward)
