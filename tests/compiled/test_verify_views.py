"""The verifier on views of communication memory: each that it can't follow, or that reaches too far, is named."""

from dataclasses import replace

import pytest
import torch
from handmade import Graph, aten, context

from vescale_compile.passes.context import GraphError, Part
from vescale_compile.runtime.unshard import ParamView


@pytest.mark.parametrize(
    ("operator", "argument"),
    [(aten._unsafe_view.default, [8]), (aten.unsafe_split.Tensor, 4), (aten.unsafe_split_with_sizes.default, [4, 4])],
)
def test_a_slot_given_away_while_a_view_is_read_that_no_schema_declares(operator, argument):
    graph = Graph()
    view = graph.call(operator, graph.gather(graph.buffer(unit=0, slot=True)), argument)
    second = graph.gather(graph.buffer(unit=1, slot=True))
    with pytest.raises(GraphError, match=r"reads the gathered parameters of unit layers\.0, whose memory holds"):
        graph.verify([graph.read(view), graph.read(second)], context(Part.FORWARD))


def test_a_result_in_gathered_memory_of_which_no_schema_tells():
    graph = Graph()
    parameters = graph.gather(graph.buffer())
    result = graph.read(parameters)
    result.meta["val"] = parameters.meta["val"]
    with pytest.raises(GraphError, match=r"lies in memory of the gathered parameters of layers\.0.*relu"):
        graph.verify([result], context(Part.FORWARD))


@pytest.mark.parametrize(("size", "stride"), [([3, 2], [3, 1]), ([2], [8])])
def test_strides_that_lead_out_of_the_parameter_that_they_are_given_to(size, stride):
    graph = Graph()
    parameters = graph.gather(graph.buffer())
    row = graph.call(aten.slice.Tensor, parameters, 0, 2, 8)
    row.meta["val"] = parameters.meta["val"][2:]
    graph.call(aten.as_strided.default, row, [3, 2], [2, 1]).meta["val"] = row.meta["val"].as_strided((3, 2), (2, 1))
    view = graph.call(aten.as_strided.default, row, size, stride)
    view.meta["val"] = torch.empty(16)[2:].as_strided(size, stride)
    with pytest.raises(
        GraphError, match=r"gathered parameters of layers\.0 at byte 8 reaches .* into what is another's"
    ):
        graph.verify([graph.read(view)], context(Part.FORWARD))


def test_a_view_at_an_offset_from_the_beginning_of_what_a_slot_is_a_part_of():
    graph = Graph()
    parameters = graph.gather(graph.buffer(slot=True))
    view = graph.call(aten.as_strided.default, parameters, [2], [1], 2)
    with pytest.raises(GraphError, match=r"gathered parameters of layers\.0 is at an offset from the beginning"):
        graph.verify([graph.read(view)], context(Part.FORWARD))


def verify_strided(begin: int, size: list[int], stride: list[int], offset: int) -> None:
    """A view by strides of what begins at an element of a unit of two parameters."""
    graph, forward = Graph(), context(Part.FORWARD)
    views = (ParamView(0, (4,), True), ParamView(4, (4,), True))
    forward = replace(forward, units=(replace(forward.units[0], views=views), forward.units[1]))
    parameters = graph.gather(graph.buffer())
    parameter = graph.call(aten.slice.Tensor, parameters, 0, begin, 8)
    parameter.meta["val"] = parameters.meta["val"][begin:]
    view = graph.call(aten.as_strided.default, parameter, size, stride, offset)
    view.meta["val"] = parameters.meta["val"].as_strided(size, stride, offset)
    graph.verify([graph.read(view)], forward)


def test_in_memory_of_the_buffers_own_a_view_may_be_at_an_offset():
    verify_strided(4, [2], [2], 5)


def test_a_view_of_no_elements_reaches_nowhere():
    verify_strided(4, [0, 4], [4, 4], 8)


@pytest.mark.parametrize(("begin", "offset"), [(4, 0), (4, 2), (0, 4)])
def test_an_offset_that_leads_to_another_parameter(begin, offset):
    with pytest.raises(GraphError, match=rf"at byte {4 * begin} reaches from {4 * offset} .* into what is another's"):
        verify_strided(begin, [4], [1], offset)
