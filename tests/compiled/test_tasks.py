"""Between which nodes of a graph launches and waits may stand, and what each collective is to the schedule."""

from dataclasses import replace

import pytest
import torch
from handmade import WORLD, Graph, S, Use, context

from vescale_compile.passes.context import CompileContext, Lowering, Part
from vescale_compile.passes.tasks import collectives_of, segments_of, task_graph
from vescale_compile.schedule import Transfer

aten = torch.ops.aten


def segments(graph: Graph, context: CompileContext) -> list[str]:
    graph.graph.output(())
    found = segments_of(graph.graph, context, collectives_of(graph.graph))
    return [" ".join(node.target.overloadpacket.__name__ for node in segment) for segment in found]


def normalized(graph: Graph) -> None:
    """What is between two matrix products, whose second operator reads a unit's parameters."""
    unit = graph.gather(graph.buffer())
    value = graph.call(aten.mm.default, unit, unit)
    value = graph.call(aten.mul.Tensor, graph.call(aten.rsqrt.default, value), unit)
    graph.call(aten.mm.default, graph.call(aten.neg.default, value), value)


def inductor(units: tuple[str, ...] = ("layers.0", "layers.1"), blocks: tuple[str, ...] = ("", "")) -> CompileContext:
    made = context(Part.FORWARD)
    named = [replace(made.units[0], name=name, block=block) for name, block in zip(units, blocks, strict=True)]
    return replace(made, lowering=Lowering.INDUCTOR, units=tuple(named))


def test_a_generated_kernel_is_not_cut_behind_what_it_reads_last() -> None:
    graph = Graph()
    normalized(graph)
    assert segments(graph, inductor()) == ["mm rsqrt mul neg", "mm"]


def test_operators_that_run_one_by_one_are() -> None:
    graph = Graph()
    normalized(graph)
    assert segments(graph, context(Part.FORWARD)) == ["mm rsqrt mul", "neg mm"]


def test_a_generated_kernel_is_not_cut_before_what_it_reads_first() -> None:
    graph = Graph()
    value = graph.call(aten.mm.default, graph.slot, graph.slot)
    value = graph.call(aten.neg.default, value)
    graph.call(aten.mul.Tensor, value, graph.gather(graph.buffer()))
    assert segments(graph, inductor()) == ["mm", "neg mul"]


def reading_three_units() -> Graph:
    graph = Graph()
    graph.shards.append(graph.placeholder("shard_2", graph.shards[0].meta["val"].numel()))
    for unit in range(3):
        graph.read(graph.gather(graph.buffer(Use.PARAMETERS, unit)))
    return graph


def test_generated_code_is_cut_where_a_third_block_is_touched() -> None:
    blocks = inductor(("layers.0", "layers.1", "layers.2"), ("", "", ""))
    assert segments(reading_three_units(), blocks) == ["relu relu", "relu"]


def test_parts_of_a_block_count_as_one() -> None:
    parts = inductor(("layers.0#0", "layers.0#1", "layers.1"), ("layers.0", "layers.0", "layers.1"))
    assert segments(reading_three_units(), parts) == ["relu relu relu"]


def gather_and_reduction(*, exchanges: bool = False) -> tuple[Transfer, ...]:
    """Of a backward that reads one unit and computes the gradients of another."""
    graph, made = Graph(), context(Part.BACKWARD)
    graph.read(graph.gather(graph.buffer()))
    graph.graph.output((graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS, 1))),))
    units = [replace(unit, comm=unit.comm._replace(exchanges=exchanges)) for unit in made.units]
    made, collectives = replace(made, units=tuple(units)), collectives_of(graph.graph)
    segments = segments_of(graph.graph, made, collectives)
    return task_graph(graph.graph, made, collectives, segments, 0, Part.BACKWARD).transfers


@pytest.mark.parametrize(("exchanges", "lanes"), [(False, ["nccl", "nccl"]), (True, ["all_gather", "reduce_scatter"])])
def test_collectives_of_a_backend_wait_for_one_another_and_messages_do_not(exchanges: bool, lanes: list[str]) -> None:
    assert [each.lane for each in gather_and_reduction(exchanges=exchanges)] == lanes


def test_a_gather_brings_a_unit_and_a_reduction_takes_one_and_scratch() -> None:
    unit = 4 * WORLD * S
    found = [(each.input_bytes, each.output_bytes, each.scratch_bytes) for each in gather_and_reduction()]
    assert found == [(0, unit, 0), (unit, 0, unit)]
