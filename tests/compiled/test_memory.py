"""What a final graph needs in memory while it runs, from its order alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from handmade import WORLD, Graph, S, aten, context
from kernels import allocated_by
from ranks import fake_world
from torch import Tensor, fx, nn
from torch.nn import functional

import vescale_compile as vc
from vescale_compile.passes.context import Lowering, Part
from vescale_compile.passes.memory import GraphMemory
from vescale_compile.passes.summary import Peak

VALUE = 4 * WORLD * S  # bytes of each value; of a shard half as many


def peak_of(graph: Graph, part: Part, lowering: Lowering = Lowering.INDUCTOR, donated: tuple[str, ...] = ()) -> Peak:
    lowered = replace(context(part), lowering=lowering, donated=frozenset(donated))
    return GraphMemory(graph.graph, lowered, part).peak()


@pytest.mark.parametrize(("products", "shards", "taken"), [(2, 0, 3), (2, 1, 3), (0, 2, 2)])
def test_a_value_that_meets_a_product_of_itself_is_memory_unless_all_stays_that_it_is_computed_from(
    products, shards, taken
):
    """As the stream of residuals is, where no backward keeps it: products between are in memory, and it beside them."""
    graph = Graph()
    begin = [graph.call(aten.mm.default, *graph.shards) for _ in range(products)]
    stream = graph.call(aten.add.Tensor, *begin, *graph.shards[:shards])
    first = graph.call(aten.mm.default, graph.call(aten.mul.Tensor, stream, 2), graph.shards[1])
    second = graph.call(aten.mm.default, first, graph.shards[1])
    graph.graph.output((graph.call(aten.add.Tensor, stream, second),))
    inputs = VALUE // 2 * 2 + VALUE  # two shards, which no collective takes here, and the slot, which nothing does
    assert peak_of(graph, Part.FORWARD).nbytes == inputs + taken * VALUE


def test_a_value_that_is_read_before_and_behind_a_product_of_something_else_is_none():
    """One kernel computes whatever reads it."""
    graph = Graph()
    value = graph.call(aten.add.Tensor, graph.call(aten.mm.default, *graph.shards), 1)
    first = graph.call(aten.mm.default, graph.shards[0], graph.shards[1])
    graph.graph.output((graph.call(aten.mul.Tensor, value, 2), first, graph.call(aten.mul.Tensor, value, 3)))
    assert peak_of(graph, Part.FORWARD).nbytes == VALUE // 2 * 2 + VALUE + 3 * VALUE  # the three results


@pytest.mark.parametrize(("operator", "taken"), [(aten.select_scatter.default, 1), (aten.diagonal_scatter.default, 2)])
def test_what_generated_code_writes_a_part_of_is_memory_although_generated_code_alone_reads_it(operator, taken):
    graph = Graph()
    value = graph.call(operator, graph.shards[0], graph.shards[1], 0, 0)
    graph.graph.output((graph.call(torch.ops.prims.rev.default, value, [0]),))
    assert peak_of(graph, Part.FORWARD).nbytes == VALUE // 2 * 2 + VALUE + taken * VALUE


LARGE = 100 * VALUE  # bytes, beside which shards and slots are nothing


def test_a_value_that_meets_what_generated_code_has_made_of_it_is_none():
    graph = Graph()
    value = graph.read(graph.call(aten.mm.default, *graph.shards))
    result = graph.call(aten.mul.Tensor, value, graph.read(graph.read(value)))
    value.meta["val"], result.meta["val"] = torch.empty(LARGE // 4), torch.empty(LARGE // 4, dtype=torch.float64)
    graph.graph.output((result,))
    assert peak_of(graph, Part.FORWARD).nbytes // LARGE == 2


def peak_of_a_backward(
    *donated: str,
    first: Callable[[Graph, fx.Node], fx.Node] = Graph.read,
    dtype: torch.dtype = torch.float32,
    lowering: Lowering = Lowering.INDUCTOR,
) -> Peak:
    """Of one that computes from a large input, by two operators, what a product reads, in the end in this dtype."""
    graph = Graph()
    between = first(graph, graph.placeholder("given", LARGE // 4))
    between.meta["val"] = torch.empty(LARGE // 4)
    value = graph.call(aten.exp.default, between)
    value.meta["val"] = torch.empty(LARGE // 4, dtype=dtype)
    graph.graph.output((graph.call(aten.mm.default, value, graph.shards[0]),))
    return peak_of(graph, Part.BACKWARD, lowering, donated)


def test_a_kernel_reads_what_it_begins_with_while_it_stores_what_it_ends_with():
    assert peak_of_a_backward().nbytes // LARGE == 2


def test_what_a_kernel_stores_takes_the_place_of_what_the_forward_kept_for_it_alone():
    assert peak_of_a_backward("given").nbytes // LARGE == 1


def test_it_takes_no_place_of_what_is_not_read_element_by_element():
    def turned(graph: Graph, value: fx.Node) -> fx.Node:
        return graph.call(torch.ops.prims.rev.default, value, [0])

    assert peak_of_a_backward("given", first=turned).nbytes // LARGE == 2


def test_an_operator_of_a_library_stores_beside_what_it_reads():
    assert peak_of_a_backward("given", lowering=Lowering.EAGER).nbytes // LARGE == 2


def test_it_takes_no_place_of_another_size():
    assert peak_of_a_backward("given", dtype=torch.bfloat16).nbytes // (LARGE // 2) == 3


def test_what_it_reduces_it_has_read_before_it_stores():
    graph = Graph()
    total = graph.call(aten.sum.default, graph.placeholder("given", LARGE // 4))
    beside = graph.call(aten.mm.default, *graph.shards)
    beside.meta["val"] = torch.empty(LARGE // 4)
    products = [graph.call(aten.mm.default, each, graph.shards[0]) for each in (graph.read(total), beside)]
    graph.graph.output(tuple(products))
    assert peak_of(graph, Part.BACKWARD).nbytes // LARGE == 1


def test_the_largest_values_of_the_fullest_moment_are_named():
    assert set(peak_of_a_backward().largest[:2]) == {("given", LARGE), ("exp_default", LARGE)}


class Classifier(nn.Module):
    """Its logits are larger than all else, and are among its results where they are asked for."""

    def __init__(self, *, tells: bool) -> None:
        super().__init__()
        self.tells, self.layer, self.head = tells, nn.Linear(8, 8), nn.Linear(8, 1000)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(self.layer(x).relu())
        loss = functional.cross_entropy(logits, labels)
        return (loss, logits) if self.tells else (loss,)


@pytest.mark.slow
@pytest.mark.parametrize("tells", [True, False])
def test_generated_code_takes_what_was_planned_whether_logits_are_a_result_or_only_kept_for_the_backward(tells):
    inputs = torch.randn(512, 8), torch.zeros(512, dtype=torch.int64)
    with fake_world(2):
        torch._dynamo.reset()
        model = vc.fully_shard(Classifier(tells=tells))
        (graph,) = vc.explain(model, *inputs).graphs
        call = torch.compile(model, backend="vescale")
        call(*inputs)[0].backward()
        model.zero_grad()
        taken = allocated_by(lambda: call(*inputs)[0].backward())
    assert max(part.peak.nbytes for part in graph.parts.values()) == pytest.approx(taken, rel=0.03)
