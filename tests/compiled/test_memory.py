"""What a final graph needs in memory while it runs, from its order alone."""

from dataclasses import replace

import pytest
from handmade import WORLD, Graph, S, aten, context

from vescale_compile.passes.context import Lowering, Part
from vescale_compile.passes.memory import peak_of

VALUE = 4 * WORLD * S  # bytes of each value; of a shard half as many


@pytest.mark.parametrize(("stays", "taken"), [(False, 3), (True, 2)])
def test_a_value_that_meets_a_product_of_itself_is_memory_unless_it_is_computed_from_what_stays(stays, taken):
    """As the stream of residuals is, where no backward keeps it: products between are in memory, and it beside them."""
    graph = Graph()
    start = graph.shards[0] if stays else graph.call(aten.mm.default, *graph.shards)
    stream = graph.call(aten.add.Tensor, start, start)
    first = graph.call(aten.mm.default, graph.call(aten.mul.Tensor, stream, 2), graph.shards[1])
    second = graph.call(aten.mm.default, first, graph.shards[1])
    graph.graph.output((graph.call(aten.add.Tensor, stream, second),))
    peak = peak_of(graph.graph, replace(context(Part.FORWARD), lowering=Lowering.INDUCTOR))
    inputs = VALUE // 2 * 2 + VALUE  # two shards, which no collective takes here, and the slot, which nothing does
    assert peak.nbytes == inputs + taken * VALUE


def test_a_value_that_is_read_before_and_behind_a_product_of_something_else_is_none():
    """One kernel computes whatever reads it."""
    graph = Graph()
    value = graph.call(aten.add.Tensor, graph.call(aten.mm.default, *graph.shards), 1)
    first = graph.call(aten.mm.default, graph.shards[0], graph.shards[1])
    graph.graph.output((graph.call(aten.mul.Tensor, value, 2), first, graph.call(aten.mul.Tensor, value, 3)))
    peak = peak_of(graph.graph, replace(context(Part.FORWARD), lowering=Lowering.INDUCTOR))
    assert peak.nbytes == VALUE // 2 * 2 + VALUE + 3 * VALUE  # the three results
