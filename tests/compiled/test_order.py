"""What is pinned to what, for Inductor to keep the order that was verified."""

import functools
import itertools
import re

import models
import pytest
import torch
from handmade import Graph
from ranks import fake_world, on_ranks
from torch import Tensor, fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor.codecache import FxGraphCachePickler
from torch._inductor.fx_utils import FakeTensorUpdater
from written import code_written_for, empty_cache

import vescale_compile as vc
from vescale_compile import warm_start
from vescale_compile.backend import vescale
from vescale_compile.passes import order, ordered_nodes
from vescale_compile.passes.context import Role, Use, comm_of
from vescale_compile.runtime.pool import SlotSpec
from vescale_compile.torch_internals import inductor_order
from vescale_compile.torch_internals.inductor_graphs import generates_code_for


@pytest.fixture(scope="module")
def graphs() -> list[fx.Graph]:
    """The final graphs of a training step, forward and backward."""
    torch._dynamo.reset()
    found: list[fx.Graph] = []
    backend = functools.partial(vescale, options={"lowering": "eager"}, on_graph=found.append)
    with fake_world(2):
        torch.compile(vc.fully_shard(models.build(models.Uneven)), backend=backend)(*models.batches(1, 11)[0])
    return found


def test_each_collective_is_behind_the_one_before(graphs):
    for graph in graphs:
        comms = [node for node in graph.nodes if comm_of(node) is not None]
        assert len(comms) > 2
        assert {*itertools.pairwise(comms)} <= {*ordered_nodes(graph)}


def test_what_must_come_after_another_comes_after_it_in_the_graph(graphs):
    for graph in graphs:
        place = {node: index for index, node in enumerate(graph.nodes)}
        assert all(place[before] < place[after] for before, after in ordered_nodes(graph))


def test_rows_are_added_up_in_a_slot_when_what_it_held_before_was_read():
    """By generated code or, where atomic additions are missing, by a library call that nothing else would hold back."""
    graph = Graph()
    read = graph.read(graph.gather(graph.buffer(slot=True)))
    gradients = graph.buffer(Use.GRADIENTS, slot=True)
    indices, rows = graph.placeholder("indices", 1), graph.placeholder("rows", 1)
    added = graph.call(torch.ops.aten.index_put_.default, gradients, [indices], rows, True)
    graph.graph.output((read, graph.reduce(gradients)))
    assert (read, added) in ordered_nodes(graph.graph)


def overlapping(graph: Graph) -> list[fx.Node]:
    """Buffers for the parameters of two units, in slots that have some memory in common."""
    return [graph.buffer(unit=unit, slot=graph.slot_at(f"slot_{unit}", 16 * unit)) for unit in range(2)]


def launch_of_second(graph: Graph) -> fx.Node:
    return next(node for node in graph.graph.nodes if (comm := comm_of(node)) and comm.unit == 1)


def test_what_is_read_of_a_slot_is_read_before_a_part_of_its_memory_is_gathered_into():
    graph = Graph()
    first, second = overlapping(graph)
    read = graph.read(graph.gather(first))
    graph.launch_gather(second)
    graph.wait_gather(second)
    graph.graph.output((read, graph.read(second)))
    assert (read, launch_of_second(graph)) in ordered_nodes(graph.graph)


def test_generated_code_writes_gradients_when_the_reduction_of_others_in_their_memory_is_over():
    graph = Graph()
    first, second = (graph.slot_at(f"slot_{at}", 16 * at) for at in range(2))
    reduced = [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=each))) for each in (first, second)]
    graph.graph.output(tuple(reduced))
    waits = [node for node in graph.graph.nodes if (comm := comm_of(node)) and comm.role is Role.WAIT]
    writes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.fill_.Scalar)
    assert (waits[0], writes[1]) in ordered_nodes(graph.graph)


def test_a_kernel_of_the_programs_own_reads_a_slot_before_its_memory_is_gathered_into():
    """Such a kernel has no result that others use."""
    graph = Graph()
    first, second = overlapping(graph)
    out = graph.call(torch.ops.aten.empty.memory_format, [8])
    kernel = graph.call(triton_kernel_wrapper_mutation, kwargs={"weight": graph.gather(first), "out": out})
    graph.launch_gather(second)
    graph.wait_gather(second)
    graph.graph.output((out, graph.read(second)))
    assert (kernel, launch_of_second(graph)) in ordered_nodes(graph.graph)


@torch.library.custom_op("tests::scale_into", mutates_args={"out"})
def scale_into(x: Tensor, scale: Tensor, out: Tensor) -> None:
    out.copy_(x * scale)


def test_a_librarys_operator_reads_a_slot_before_another_writes_its_memory_between_the_same_collectives():
    """As parameters are dequantized."""
    graph = Graph()
    first, second = overlapping(graph)
    gathered = graph.gather(first)
    read = graph.call(torch.ops.aten.mv.default, gathered, gathered)
    written = graph.call(torch.ops.tests.scale_into.default, read, read, second)
    graph.graph.output((read, graph.read(second)))
    assert (read, written) in ordered_nodes(graph.graph)


class ScaledInPlace(nn.Module):
    """Layers whose parameter is read by an operator that writes its argument, and has no result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList([torch.full((8,), number)]) for number in (2.0, 3.0, 5.0, 7.0))

    def forward(self, x: Tensor) -> Tensor:
        for (scale,) in self.layers:
            out = torch.empty_like(x)
            scale_into(x, scale, out)
            x = out
        return x


@on_ranks(2)
def test_an_operator_that_writes_its_arguments_may_read_parameters_in_a_slot():
    torch._dynamo.reset()
    call = torch.compile(vc.fully_shard(ScaledInPlace()), backend="vescale")
    with torch.no_grad():
        assert call(torch.ones(8)).tolist() == [210.0] * 8


class Normalized(nn.Module):
    """Layers whose weights are divided by their norms, in generated code and behind the product."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(8, 8), (8, 8), (8,)]
        self.layers = nn.ModuleList(nn.ParameterList([torch.randn(size) / 4 for size in sizes]) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for first, second, size in self.layers:
            scale = size / first.norm(dim=1).detach()
            y = x @ first.T
            x = x + y + (scale - 1) * y + scale * (torch.nn.functional.silu(y) @ second.T)
        return x.square().mean()


class Growing(nn.Module):
    """Layers like those, each with a larger slot than the last, of which many lie in another's memory."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [[(width, 8), (8, width), (width,)] for width in (8, 12, 16)]
        self.layers = nn.ModuleList(nn.ParameterList([torch.randn(size) / 4 for size in layer]) for layer in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for first, second, size in self.layers:
            scale = size / first.norm(dim=1).detach()
            y = x @ first.T
            x = x + (scale * torch.nn.functional.silu(y + (scale - 1) * y)) @ second.T
            x = x + scale.sum() * x
        return x.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("program", [Normalized, Growing])
@on_ranks(2)
def test_what_kernels_compute_from_a_parameter_anew_they_compute_before_its_slot_is_given_away(program):
    torch._dynamo.reset()
    model, call = models.sharded(program, compile="inductor", cluster=models.SLOW_WIRE)
    reference = models.build(program)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(call(x), reference(x))
    call(x).backward()
    reference(x).backward()
    models.assert_gradients_of(model, reference, atol=1e-5)


def test_code_that_reads_a_slot_too_late_is_refused(monkeypatch):
    """As Inductor writes it where nothing holds it to the order of the graph."""
    monkeypatch.setattr(order, "_reads_before_writes", lambda *_: [])
    monkeypatch.setattr(inductor_order, "written_by", lambda node: [])
    torch._dynamo.reset()
    with fake_world(2):
        model = torch.compile(vc.fully_shard(Normalized()), backend="vescale", options={"cluster": models.SLOW_WIRE})
        with torch.no_grad(), pytest.raises(Exception, match=r"Inductor would have .* read slot_"):
            code_written_for(lambda: model(torch.ones(16, 8)))


def test_code_that_reads_a_slot_when_another_has_some_of_its_memory_is_refused(monkeypatch):
    """As Inductor writes it where it is not told what they have in common."""
    monkeypatch.setattr(order, "sharing_memory", lambda graph: {slot: (slot,) for slot in graph.nodes})
    torch._dynamo.reset()
    with fake_world(2):
        model = torch.compile(vc.fully_shard(Growing()), backend="vescale", options={"cluster": models.SLOW_WIRE})
        with torch.no_grad(), pytest.raises(Exception, match=r"Inductor would have .* read slot_"):
            code_written_for(lambda: model(torch.ones(16, 8)))


def test_a_kernel_that_computes_what_a_pinned_operator_reads_is_fused_with_earlier_ones():
    """It is no part of the operator: only the product of the second one is behind the first product."""

    def products(x, weight):
        return x.sin() @ weight, x.cos() @ weight

    def pinned(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
        first, second = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        return [(first, second)]

    compiled = torch.compile(products)
    with inductor_order.order_kept(pinned):
        (code,) = code_written_for(lambda: compiled(torch.ones(4, 8), torch.ones(8, 2)))
    assert re.findall(r"^ *(cpp_fused\w*|extern_kernels\.mm)\(", code, re.MULTILINE) == [
        "cpp_fused_cos_sin_0",
        "extern_kernels.mm",
        "extern_kernels.mm",
    ]


def test_generated_code_that_waits_may_write_what_was_not_in_memory():
    """As a product's rows are added to a value that no kernel has stored before."""

    def add_rows(x, weight, rows):
        return x.sin().index_put((rows,), x @ weight, accumulate=True)

    def pinned(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
        (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        (added,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index_put_.default)
        return [(product, added)]

    compiled = torch.compile(add_rows)
    given = torch.ones(4, 4), torch.ones(4, 4), torch.tensor([0, 0, 2, 3])
    with inductor_order.order_kept(pinned), empty_cache():
        torch.testing.assert_close(compiled(*given), add_rows(*given))


def calls_of(graph: fx.Graph) -> list[str]:
    """The operators of the runtime that a graph calls, in order."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.removesuffix(".default") for name in names if name.startswith("vescale.")]


def test_a_pass_of_the_users_that_would_not_run_is_refused():
    torch._dynamo.reset()
    with fake_world(2), torch._inductor.config.patch(_post_fusion_custom_pass=lambda nodes: nodes):
        model = torch.compile(vc.fully_shard(models.build(models.Uneven)), backend="vescale")
        with pytest.raises(Exception, match="_post_fusion_custom_pass"):
            model(*models.batches(1, 11)[0])


@pytest.mark.slow
def test_a_pass_of_the_users_sees_the_graph_as_it_is_scheduled():
    torch._dynamo.reset()
    planned: list[list[str]] = []
    seen: list[list[str]] = []
    backend = functools.partial(vescale, on_graph=lambda graph: planned.append(calls_of(graph)))
    note = torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: seen.append(calls_of(graph)))
    with fake_world(2), note, torch.no_grad():
        model = torch.compile(vc.fully_shard(models.build(models.Uneven)), backend=backend)
        code_written_for(lambda: model(*models.batches(1, 11)[0]))
    assert seen == planned
    assert len(seen[0]) > 3


@pytest.mark.slow
def test_inductor_finds_the_graph_as_it_was_told_and_computes_no_example_anew(monkeypatch):
    changed: list[int] = []
    update = FakeTensorUpdater.incremental_update
    monkeypatch.setattr(FakeTensorUpdater, "incremental_update", lambda self: changed.append(update(self)))
    torch._dynamo.reset()
    with fake_world(2):
        model = torch.compile(vc.fully_shard(models.build(models.one_layer_llama)), backend="vescale")
        code_written_for(lambda: model(*models.batches(1, 64)[0]).backward())
    assert len(changed) > 1
    assert not any(changed)


def test_code_is_found_of_the_same_version_for_slots_in_the_same_places_only(monkeypatch):
    graph = fx.symbolic_trace(torch.nn.ReLU())
    keys = []
    for version, offset in (("this", 0), ("this", 0), ("another", 0), ("this", 128)):
        monkeypatch.setattr(warm_start, "sources", lambda version=version: version)
        warm_start.mark_version(graph, [SlotSpec(8, torch.float32, torch.device("cpu"), offset=offset)])
        keys.append(FxGraphCachePickler(graph).get_hash(graph))
    assert keys[0] == keys[1]
    assert len({*keys}) == 3


def test_a_version_is_of_all_passes(monkeypatch):
    hashed: list[tuple[str, ...]] = []
    monkeypatch.setattr(warm_start, "get_hash_for_files", lambda paths: hashed.append(paths) or b"")
    warm_start.sources.__wrapped__()
    assert {"aliases.py", "context.py", "order.py"} <= {path.rpartition("/")[2] for path in hashed[0]}


@pytest.mark.parametrize("operator", ["mm", "_grouped_mm", "_scaled_mm", "convolution"])
def test_products_are_calls_of_libraries_which_write_no_slot_by_themselves(operator):
    assert not generates_code_for(getattr(torch.ops.aten, operator).default)


@pytest.mark.parametrize("operator", ["all_gather_into_tensor", "all_to_all_single", "wait_tensor"])
def test_the_programs_own_collectives_are_calls_which_keep_their_place(operator):
    assert not generates_code_for(getattr(torch.ops._c10d_functional, operator).default)
