"""What the passes make of quantized communication: two buffers for a gather, counted bytes, and a proof of both."""

import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import fake_world, on_ranks
from torch import Tensor, fx, nn

import vescale_compile as vc
from vescale_compile.cost.collectives import REDUCE_SCATTER
from vescale_compile.passes.context import Comm, GraphError, Part, Role, Use
from vescale_compile.passes.summary import Direction, Kind
from vescale_compile.passes.tenants import check_tenants, note_tenants
from vescale_compile.runtime import quantized_ops

sys.path.append(str(Path(__file__).parents[1] / "compiled"))

import models
from handmade import Graph, aten, context
from test_census import counted, total
from test_graphs import dump_of_one_step
from test_warm_start import Products

pytestmark = pytest.mark.slow  # left out of `make test-fast`

IN_INT8 = {"quantize": vc.BlockInt8(32), "quantize_gradients": vc.BlockInt8(32)}


@functools.cache
def explained(**options):
    """The report of a small model on two ranks."""
    torch._dynamo.reset()
    with fake_world(2):
        model = vc.fully_shard(models.build(functools.partial(InBlocks, 2)), **options)
        (graph,) = vc.explain(model, *models.batches(1, 64, rank=0)[0], options={"lowering": "eager"}).graphs
        return graph


# What the census counts.


@on_ranks(2)
def test_the_census_counts_what_a_profiler_sees():
    options = {"quantize": vc.BlockFP8((8, 8)), "quantize_gradients": vc.BlockInt8(32)}
    graphs, step, profile = counted(InBlocks, "eager", 64, **options)
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.BUFFER):
        assert {key: graphs[key] for key in graphs if kind in key} == {key: step[key] for key in step if kind in key}
    moved = total(graphs, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    assert profile.collectives["send"].sent_bytes == moved / 2
    assert set(profile.collectives) == {"send", "receive"}
    # Operator by operator, what arithmetic computes is written by a copy, but for padding and what is not quantized.
    written = profile.copies.copied_bytes + profile.copies.copy_in_bytes - total(graphs, Kind.COPY, Kind.CONCATENATION)
    assert 0 < written <= total(graphs, Kind.CAST)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x) * self.scale))


class InBlocks(nn.Module):
    """Units of as many blocks on each rank, which one kernel quantizes, and parameters that are not quantized."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 32), nn.ModuleList(Block() for _ in range(layers))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


@on_ranks(2, deadline_s=600)
def test_compiled_kernels_copy_nothing_from_or_to_what_travels():
    options = {"quantize": vc.BlockFP8((3, 7)), "quantize_gradients": vc.BlockInt8(49)}
    profile = counted(Products, "inductor", 11, **options).profile
    assert profile.copies.copied_bytes == profile.copies.cast_bytes == profile.copies.copy_in_bytes == 0


@pytest.mark.parametrize(("quantizer", "scale_bytes"), [(vc.BlockInt8(32), 4 / 32), (vc.MXFP8(), 1 / 32)], ids=repr)
def test_a_gather_takes_a_byte_for_an_element_and_its_scales(quantizer, scale_bytes):
    plain, quantized = explained(), explained(**{**IN_INT8, "quantize": quantizer})
    before, after = (
        {e.unit: e.nbytes for e in graph.parts[Part.FORWARD].entries if e.kind is Kind.ALL_GATHER}
        for graph in (plain, quantized)
    )
    assert list(before) == list(after) == ["(root)", "layers.0", "layers.1"]
    scales = {"(root)": 0, "layers.0": 32, "layers.1": 32}  # elements that travel in float32
    for unit, nbytes in before.items():
        wanted = nbytes / 4 * (1 + scale_bytes) + scales[unit] * 4
        assert after[unit] == pytest.approx(wanted, abs=2 * (32 * 4 + 64))  # uneven shares, alignment


def test_blocks_of_256_bring_a_quarter_and_a_little():
    with fake_world(4):
        module = vc.fully_shard(torch.nn.Linear(1024, 1024, bias=False), quantize=vc.BlockInt8())
        (buffer,) = module._vescale_unit.buffers
        assert buffer.packing.nbytes == 1024 * 1024 + 1024 * 1024 // 256 * 4


def test_quantization_and_dequantization_are_declared_casts():
    graph = explained(**IN_INT8)
    for part, summary in graph.parts.items():
        casts = [entry for entry in summary.entries if entry.kind is Kind.CAST]
        gathers = [entry for entry in summary.entries if entry.kind is Kind.ALL_GATHER]
        reductions = [entry for entry in summary.entries if entry.kind is Kind.REDUCE_SCATTER]
        assert len(reductions) == (3 if part is Part.BACKWARD else 0)
        assert len(casts) == 2 * len(gathers) + 2 * len(reductions)
        ways = [entry.direction for entry in casts]
        assert ways.count(Direction.GATHER) == 2 * len(gathers)


# Where things are in the graph.


def test_packed_buffers_are_given_up_once_dequantized():
    """Slots of bytes change hands: a layer's codes do not wait for the layer's computation to end."""
    forward = explained(**IN_INT8).parts[Part.FORWARD]
    lives = {tenant.what: tenant for slot in forward.slots for tenant in slot.tenants if not slot.carried}
    for unit in ("layers.0", "layers.1"):
        packed, full = (lives[f"gathered {what} of {unit}"] for what in ("codes and scales", "parameters"))
        assert packed.last == full.first
        assert packed.first < packed.last < full.last


def test_gathers_are_launched_before_the_computation_ahead_of_them():
    schedule = explained(**IN_INT8).parts[Part.FORWARD].schedule
    assert schedule.index("launch all_gather of layers.0") < schedule.index("wait all_gather of (root)")


def test_gradient_buffers_are_free_as_soon_as_their_codes_are_made():
    backward = explained(**IN_INT8).parts[Part.BACKWARD]
    lives = {tenant.what: tenant for slot in backward.slots for tenant in slot.tenants}
    assert lives["gradients of layers.1"].last < lives["scratch of a reduction of layers.1"].last


def test_a_unit_is_one_collective_each_way():
    graph = explained(**IN_INT8)
    started = ("launch", "carry", "take")
    forward, backward = ([e for e in part.schedule if e.startswith(started)] for part in graph.parts.values())
    for unit in ("(root)", "layers.0", "layers.1"):
        assert forward.count(f"launch all_gather of {unit}") == 1
        assert backward.count(f"launch reduce_scatter of {unit}") == 1
    assert {"take all_gather of layers.1", "launch all_gather of layers.0"} <= {*backward}  # the root is kept
    assert len(forward) == 3 + 1 and len(backward) == 2 + 3


def test_codes_that_the_backward_needs_first_are_gathered_while_the_forward_ends():
    graph = explained(**IN_INT8)
    assert graph.parts[Part.FORWARD].schedule[-1] == "carry all_gather of layers.1"
    for part in graph.parts.values():
        (slot,) = (slot for slot in part.slots if slot.carried)
        (tenant,) = slot.tenants
        (gathered,) = (e.nbytes for e in part.entries if e.kind is Kind.ALL_GATHER and e.unit == "layers.1")
        assert (tenant.what, slot.nbytes) == ("gathered codes and scales of layers.1", gathered)


@on_ranks(3)
def test_every_graph_is_the_same_on_every_rank_whatever_the_shards(tmp_path):
    options = {"quantize": vc.BlockFP8((3, 5)), "quantize_gradients": vc.BlockInt8(7)}
    dumps = dump_of_one_step(tmp_path, functools.partial(models.Uneven, 1), 11, **options)
    everyone: list[dict[str, str]] = [{}] * 3
    dist.all_gather_object(everyone, {name: text for name, text in dumps.items() if "before-hoist" not in name})
    assert everyone[0] == everyone[1] == everyone[2]
    assert any("start_reduce_scatter_quantized" in text for text in everyone[0].values())


# What the verifier proves.


class QuantizedGraph(Graph):
    """One in which parameters come as codes."""

    def launch(self, packed: fx.Node) -> None:
        mark = Comm("all_gather", Role.LAUNCH, 0)
        args = (self.shards[0], packed, 0, "0", "packing", False)
        self.call(quantized_ops.start_all_gather_quantized, *args, mark=mark)

    def dequantize(self, packed: fx.Node, full: fx.Node) -> fx.Node:
        self.call(quantized_ops.dequantize, packed, full, full.meta["vescale"].unit, "packing", False)
        return full

    def gather_quantized(self, packed: fx.Node) -> fx.Node:
        self.launch(packed)
        self.wait_gather(packed)
        return self.dequantize(packed, self.buffer())

    def launch_reduction(self, gradients: fx.Node) -> list[fx.Node]:
        buffers = [self.buffer(Use.REDUCED), self.buffer(Use.SCRATCH), self.buffer(Use.SCRATCH)]
        args = (gradients, *buffers, 0, "0", "", "packing", self.placeholder("rounding", 1), False)
        self.call(quantized_ops.start_reduce_scatter_quantized, *args, mark=Comm(REDUCE_SCATTER, Role.LAUNCH, 0))
        return buffers

    def wait_reduction(self, buffers: list[fx.Node]) -> fx.Node:
        mark = Comm(REDUCE_SCATTER, Role.WAIT, 0)
        self.call(quantized_ops.wait_reduce_scatter_quantized, *buffers, 0, mark=mark)
        return buffers[0]


def test_correct_graphs_pass():
    graph = QuantizedGraph()
    graph.verify([graph.read(graph.gather_quantized(graph.buffer(Use.PACKED)))], context(Part.FORWARD))
    graph = QuantizedGraph()
    buffers = graph.launch_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    graph.verify([graph.wait_reduction(buffers)], context(Part.BACKWARD, reduced=(0,)))


def test_dequantizing_before_the_wait():
    graph = QuantizedGraph()
    packed, full = graph.buffer(Use.PACKED), graph.buffer()
    graph.launch(packed)
    graph.dequantize(packed, full)
    graph.wait_gather(packed)
    with pytest.raises(GraphError, match=r"codes and scales of unit layers\.0 are read before the wait"):
        graph.verify([graph.read(full)], context(Part.FORWARD))


def test_reading_parameters_before_they_are_dequantized():
    graph = QuantizedGraph()
    packed, full = graph.buffer(Use.PACKED), graph.buffer()
    graph.launch(packed)
    graph.wait_gather(packed)
    early = graph.read(full)
    graph.dequantize(packed, full)
    with pytest.raises(GraphError, match=r"gathered parameters of unit layers\.0 are read before anything was written"):
        graph.verify([early], context(Part.FORWARD))


def test_dequantizing_twice():
    graph = QuantizedGraph()
    packed = graph.buffer(Use.PACKED)
    full = graph.gather_quantized(packed)
    graph.dequantize(packed, full)
    with pytest.raises(GraphError, match="dequantized a second time"):
        graph.verify([graph.read(full)], context(Part.FORWARD))


@pytest.mark.parametrize(("use", "unit"), [(Use.PACKED, 1), (Use.PARAMETERS, 0)])
def test_dequantizing_what_another_unit_gathered_or_what_are_no_codes(use, unit):
    graph = QuantizedGraph()
    full = graph.dequantize(graph.gather(graph.buffer(use)), graph.buffer(unit=unit))
    with pytest.raises(GraphError, match=rf"parameters of unit layers\.{unit} are dequantized from another buffer"):
        graph.verify([graph.read(full)], context(Part.FORWARD))


def test_codes_that_something_else_reads():
    graph = QuantizedGraph()
    packed = graph.buffer(Use.PACKED)
    graph.gather_quantized(packed)
    with pytest.raises(GraphError, match="are read by what does not dequantize them"):
        graph.verify([graph.read(packed)], context(Part.FORWARD))


def test_a_packed_slot_given_away_before_it_is_dequantized():
    graph = QuantizedGraph()
    packed, full = graph.buffer(Use.PACKED, slot=True), graph.buffer()
    graph.launch(packed)
    graph.wait_gather(packed)
    graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True))
    graph.dequantize(packed, full)
    with pytest.raises(GraphError, match="whose memory holds the gradients"):
        graph.verify([graph.read(full)], context(Part.BACKWARD))


def test_a_packed_slot_given_away_while_its_gather_is_in_flight():
    graph = QuantizedGraph()
    graph.launch(graph.buffer(Use.PACKED, slot=True))
    graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True))
    with pytest.raises(GraphError, match="writes to memory on which a collective is in flight"):
        graph.verify([graph.shards[0]], context(Part.BACKWARD))


def test_parameters_dequantized_into_memory_that_is_in_flight():
    graph = QuantizedGraph()
    packed = graph.buffer(Use.PACKED)
    graph.launch(packed)
    graph.wait_gather(packed)
    graph.launch_gather(graph.buffer(unit=1, slot=True))
    full = graph.dequantize(packed, graph.buffer(slot=True))
    with pytest.raises(GraphError, match="writes to memory on which a collective is in flight"):
        graph.verify([graph.read(full)], context(Part.FORWARD))


def test_a_quantized_gather_without_a_wait():
    graph = QuantizedGraph()
    graph.launch(graph.buffer(Use.PACKED))
    with pytest.raises(GraphError, match=r"the collective on the gathered codes and scales of unit .* has no wait"):
        graph.verify([graph.shards[0]], context(Part.FORWARD))


def test_writing_to_parameters_that_were_dequantized():
    graph = QuantizedGraph()
    full = graph.gather_quantized(graph.buffer(Use.PACKED))
    written = graph.call(aten.mul_.Tensor, full, 2.0)
    with pytest.raises(GraphError, match=r"writes to the gathered parameters of unit layers\.0"):
        graph.verify([written], context(Part.FORWARD))


def test_keeping_the_dequantized_parameters_of_a_unit_that_reshards():
    graph = QuantizedGraph()
    full = graph.gather_quantized(graph.buffer(Use.PACKED))
    with pytest.raises(GraphError, match=r"unit layers\.0 is resharded after forward, but its parameters are kept"):
        graph.verify([full], context(Part.FORWARD))


def test_a_gradient_written_after_it_was_quantized():
    graph = QuantizedGraph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    buffers = graph.launch_reduction(gradients)
    graph.write_gradient(gradients)
    with pytest.raises(GraphError, match="whose reduction was launched before"):
        graph.verify([graph.wait_reduction(buffers)], context(Part.BACKWARD, reduced=(0,)))


def test_a_quantized_reduction_without_a_wait():
    graph = QuantizedGraph()
    graph.launch_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    with pytest.raises(GraphError, match=r"of unit layers\.0 has no wait"):
        graph.verify([graph.shards[0]], context(Part.BACKWARD, reduced=(0,)))


def test_a_reduced_gradient_read_before_the_wait():
    graph = QuantizedGraph()
    buffers = graph.launch_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    early = graph.call(aten._to_copy.default, buffers[0])
    graph.wait_reduction(buffers)
    with pytest.raises(GraphError, match=r"reduced gradients of unit layers\.0 are read before the wait"):
        graph.verify([early], context(Part.BACKWARD, reduced=(0,)))


def test_parameters_where_gradients_were_whose_codes_are_in_flight():
    graph = QuantizedGraph()
    packed = graph.buffer(Use.PACKED)
    graph.launch(packed)
    buffers = graph.launch_reduction(graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    graph.wait_gather(packed)
    full = graph.dequantize(packed, graph.buffer(slot=True))
    read = graph.read(graph.call(aten.view.default, full, [8]))
    reduced = graph.wait_reduction(buffers)
    graph.verify([read, reduced], context(Part.BACKWARD, reduced=(0,)))
    note_tenants(graph.graph)
    check_tenants(graph.graph)
