"""What Inductor's own passes make of a graph reads what the graph read."""

import models
import pytest
import torch
from handmade import Graph
from ranks import fake_world, on_ranks
from torch import Tensor, fx, nn
from written import code_written_for

import vescale_compile as vc
from vescale_compile import backend
from vescale_compile.passes.context import GraphError
from vescale_compile.passes.tenants import check_tenants, note_tenants

pytestmark = pytest.mark.slow  # left out of `make test-fast`

WIDTH = 16


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class CastThereAndBack(nn.Module):
    """Reads its table and its first layer's weight early and uses them late, as casts that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Matrix() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        table, weight = self.table.weight.double().float(), self.layers[0].weight.double().float()
        x = x + table
        for layer in self.layers:
            x = layer(x)
        return (x @ weight @ table.T).square().mean()


@on_ranks(2)
def test_a_parameter_that_is_cast_there_and_back_may_be_used_late():
    torch._dynamo.reset()
    model, call = models.sharded(CastThereAndBack, compile="inductor")
    reference = models.build(CastThereAndBack)
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = reference(x)
    with torch.no_grad():
        torch.testing.assert_close(call(x), expected.detach())
    loss = call(x)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    models.assert_gradients_of(model, reference, atol=1e-6)


def test_what_inductors_passes_would_have_read_too_late_is_refused(monkeypatch):
    """As they do where what they remove is still there when slots are assigned."""
    monkeypatch.setattr(backend, "remove_what_does_nothing", lambda gm, inputs: None)
    torch._dynamo.reset()
    with fake_world(2):
        model = torch.compile(vc.fully_shard(CastThereAndBack()), backend="vescale")
        with torch.no_grad(), pytest.raises(Exception, match=r"reads slot_\d where it does not hold"):
            code_written_for(lambda: model(torch.ones(WIDTH, WIDTH)))


@pytest.fixture
def two_in_a_slot() -> tuple[Graph, list[fx.Node]]:
    """One buffer after another in the same slot, each read through a view, and what reads the first one."""
    graph = Graph()
    reads = []
    for unit in range(2):
        buffer = graph.gather(graph.buffer(unit=unit, slot=True))
        reads.append(graph.read(graph.call(torch.ops.aten.view.default, buffer, [8])))
    graph.graph.output(tuple(reads))
    note_tenants(graph.graph)
    return graph, reads


def test_a_graph_that_is_left_as_it_was_passes(two_in_a_slot):
    graph, _ = two_in_a_slot
    check_tenants(graph.graph)


class Rows(nn.Module):
    """Reads rows of its table by an index: their gradients are scattered into it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, index: Tensor) -> Tensor:
        return self.table[index].square().mean()


@on_ranks(2)
def test_rows_are_scattered_where_the_user_has_inductor_replace_large_scatters():
    """By a pass that takes for unused what writes in place, and drops it."""
    torch._dynamo.reset()
    index = torch.randint(64, (8192,), generator=torch.Generator().manual_seed(0))
    reference = models.build(Rows)
    reference(index).backward()
    option = "partitioned_scatter_enabled"
    patch = {option: True} if option in torch._inductor.list_options() else {}
    with torch._inductor.config.patch(patch):
        model, call = models.sharded(Rows, compile="inductor")
        call(index).backward()
    models.assert_gradients_of(model, reference, atol=1e-6)


def test_a_graph_whose_write_was_dropped_is_refused(two_in_a_slot):
    graph, _ = two_in_a_slot
    launch = next(node for node in graph.graph.nodes if "start_all_gather" in str(node.target))
    graph.graph.erase_node(launch)
    with pytest.raises(GraphError, match=r"slot is written 3 times, where the program writes it 4 times"):
        check_tenants(graph.graph)


def test_a_read_that_is_moved_behind_the_next_gather_is_refused(two_in_a_slot):
    graph, (first, second) = two_in_a_slot
    second.append(first)
    with pytest.raises(GraphError, match=r"%relu.* reads slot where"):
        check_tenants(graph.graph)


def test_a_read_that_is_moved_though_its_view_is_a_new_one_is_refused(two_in_a_slot):
    """Nothing says of what Inductor's passes insert which buffer it is of."""
    graph, (first, second) = two_in_a_slot
    view = first.all_input_nodes[0]
    with graph.graph.inserting_after(view):
        inserted = graph.graph.call_function(torch.ops.aten.view.default, (view, [2, 4]))
    first.replace_input_with(view, inserted)
    check_tenants(graph.graph)
    second.append(first)
    with pytest.raises(GraphError, match="reads slot where"):
        check_tenants(graph.graph)


def test_a_read_that_is_moved_before_the_wait_is_refused(two_in_a_slot):
    graph, (first, _) = two_in_a_slot
    view = first.all_input_nodes[0]
    wait = view.prev
    wait.prepend(view)
    wait.prepend(first)
    with pytest.raises(GraphError, match="reads slot where"):
        check_tenants(graph.graph)


def test_a_read_that_is_moved_behind_a_gather_into_a_part_of_its_memory_is_refused():
    graph = Graph()
    buffers = [graph.buffer(unit=unit, slot=graph.slot_at(f"slot_{unit}", 16 * unit)) for unit in range(2)]
    first, second = (graph.read(graph.call(torch.ops.aten.view.default, graph.gather(each), [8])) for each in buffers)
    graph.graph.output((first, second))
    note_tenants(graph.graph)
    check_tenants(graph.graph)
    second.append(first)
    with pytest.raises(GraphError, match=r"reads slot_0 where"):
        check_tenants(graph.graph)


def test_what_lies_in_a_slot_as_a_whole_is_known_when_its_slice_is_gone(two_in_a_slot):
    """Inductor removes slices of all there is."""
    graph, (first, second) = two_in_a_slot
    for part in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        part.replace_all_uses_with(graph.slot)
        graph.graph.erase_node(part)
    check_tenants(graph.graph)
    second.append(first)
    with pytest.raises(GraphError, match="reads slot where"):
        check_tenants(graph.graph)
