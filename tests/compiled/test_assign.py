"""Where communication buffers lie, of known lifetimes."""

import itertools
import random

import models
import pytest
import torch
from handmade import WORLD, Graph, aten
from ranks import on_ranks
from torch import Tensor, fx, nn

import vescale_compile as vc
from vescale_compile.passes.aliases import bases_of
from vescale_compile.passes.assign import Lifetime, lifetimes, places_for, slots_for
from vescale_compile.passes.context import Buffer, Part, Use
from vescale_compile.runtime.pool import SlotSpec, pooled_bytes

KB = 256  # elements of float32


def buffer(
    numel: int, first: int, last: int, use: Use = Use.PARAMETERS, dtype: torch.dtype = torch.float32
) -> Lifetime:
    node = fx.Graph().call_function(aten.empty.memory_format)
    node.meta.update(val=torch.empty(numel, dtype=dtype, device="meta"), vescale=Buffer(use, 0))
    return Lifetime(node, first, last)


def places(*buffers: Lifetime) -> list[tuple[int, int]]:
    """The first byte of each slot, and the one behind it."""
    return sorted((slot.offset, slot.end) for slot in slots_for(buffers))


def test_what_a_collective_of_the_programs_sends_lives_until_that_is_waited_for():
    graph, c10d = Graph(), torch.ops._c10d_functional
    gathered = graph.gather(graph.buffer())
    sent = graph.call(c10d.all_gather_into_tensor.default, gathered, WORLD, "1")
    wait = graph.call(c10d.wait_tensor.default, graph.call(aten.view.default, sent, [2, 4]))
    (lifetime,) = lifetimes(graph.graph, bases_of(graph.graph))
    assert lifetime.last == list(graph.graph.nodes).index(wait)


def test_what_lives_at_other_times_lies_in_the_same_slot():
    assert places(buffer(KB, 0, 3), buffer(KB, 4, 6), buffer(KB, 7, 7)) == [(0, 1024)]


def test_small_buffers_lie_side_by_side_where_a_large_one_was():
    large, *small = buffer(4 * KB, 0, 3), *(buffer(KB, 4, 9) for _ in range(3))
    assert places(large, *small) == [(0, 1024), (0, 4096), (1024, 2048), (2048, 3072)]


def test_layers_that_repeat_lie_in_the_same_slots():
    """Of four parts, the largest behind the small ones, each gathered while the one before is read."""
    parts = [2 * KB, KB, KB, 7 * KB] * 12
    layers = [buffer(size, at, at + 1) for at, size in enumerate(parts)]
    assert places(*layers) == places(*layers[:8])
    assert len(places(*layers)) == 4


@pytest.mark.parametrize("backwards", [False, True])
def test_what_grows_to_a_graphs_end_or_from_it_takes_what_lives_at_its_fullest_moment(backwards):
    extents = [(KB, 0, 1), (2 * KB, 1, 2), (3 * KB, 2, 3), (4 * KB, 3, 4), (5 * KB, 4, 5)]
    buffers = [
        buffer(size, 5 - last, 5 - first) if backwards else buffer(size, first, last) for size, first, last in extents
    ]
    assert pooled_bytes([slots_for(buffers)]) == 9 * 1024


def test_the_last_node_that_touches_a_buffer_is_no_place_for_the_next():
    assert places(buffer(KB, 0, 3), buffer(KB, 3, 6)) == [(0, 1024), (1024, 2048)]


def test_slots_begin_where_lines_of_the_cache_do():
    assert places(buffer(3, 0, 3), buffer(2, 0, 3)) == [(0, 12), (128, 136)]


def test_parameters_and_gradients_of_a_graph_have_no_memory_in_common():
    """As generated code reads the one and writes the other."""
    assert places(buffer(KB, 0, 3), buffer(KB, 4, 6, Use.GRADIENTS), buffer(8, 7, 9, Use.REDUCED)) == [
        (0, 1024),
        (1024, 2048),
        (2048, 2080),
    ]


@pytest.mark.parametrize(
    ("by_nccl", "by_inductor", "shared"), [("0", False, True), ("1", False, False), ("0", True, False)]
)
def test_where_somebody_looks_for_nan_each_dtype_has_memory_of_its_own(monkeypatch, by_nccl, by_inductor, shared):
    """What bfloat16 leaves of two numbers is finite as one of float32; halves of one of float32 may not be."""
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", by_nccl)
    with torch._inductor.config.patch(nan_asserts=by_inductor):
        parameters, gradients = slots_for([buffer(KB, 0, 1, dtype=torch.bfloat16), buffer(KB, 2, 3, Use.GRADIENTS)])
    assert (parameters.memory == gradients.memory) is shared
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", "0")  # as where a graph that was compiled under it is found again
    assert not parameters.overlaps(gradients)
    assert (parameters.memory == gradients.memory) is shared


@pytest.mark.parametrize("seed", range(20))
def test_no_two_that_live_at_the_same_time_have_memory_in_common(seed):
    draw = random.Random(seed)
    starts = [draw.randrange(50) for _ in range(40)]
    sizes = [draw.choice([KB, 3 * KB, 8 * KB, draw.randrange(1, 9 * KB)]) for _ in starts]
    buffers = [buffer(size, start, start + draw.randrange(8)) for start, size in zip(starts, sizes, strict=True)]
    slots = places_for(buffers)
    for first, second in itertools.combinations(buffers, 2):
        if first.first <= second.last and second.first <= first.last:
            assert not slots[first].overlaps(slots[second])
    fullest = max(sum(each.nbytes for each in buffers if each.first <= at <= each.last) for at in range(60))
    assert fullest <= pooled_bytes([tuple(slots.values())]) <= 1.25 * fullest


class LargeEnds(nn.Module):
    """Small layers, of products and of what generated code reads, between an embedding and a head that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 32)
        sizes = [(32, 32), (32,), (32, 32)]
        self.layers = nn.ModuleList(nn.ParameterList([torch.randn(size) / 6 for size in sizes]) for _ in range(4))
        self.head = nn.Linear(32, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for first, gain, second in self.layers:
            x = x + torch.tanh(x @ first * gain) @ second * torch.sigmoid(gain)
        return self.head(x).square().mean()


@pytest.mark.slow
@on_ranks(2)
def test_a_step_whose_slots_have_memory_in_common_computes_what_the_unsharded_model_does():
    torch._dynamo.reset()
    model, reference = models.build(LargeEnds), models.build(LargeEnds)
    for unit in (model.table, *model.layers, model.head, model):
        vc.fully_shard(unit)
    call = torch.compile(model, backend="vescale")
    tokens = torch.arange(64)
    for _ in range(2):
        loss, expected = call(tokens), reference(tokens)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    models.assert_gradients_of(model, reference, atol=1e-6)
    (graph,) = vc.explain(model, tokens).graphs
    slots = [
        SlotSpec(use.nbytes, torch.uint8, torch.device("cpu"), offset=use.offset)
        for use in graph.parts[Part.BACKWARD].slots
        if not use.carried
    ]
    assert any(one.overlaps(other) for one, other in itertools.combinations(slots, 2))
