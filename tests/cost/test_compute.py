"""Time of graph nodes: arithmetic by formula, traffic by what enters and leaves a kernel."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from vescale_compile.cost import Device
from vescale_compile.cost import flops as arithmetic
from vescale_compile.cost.compute import compute_seconds, issue_seconds
from vescale_compile.cost.flops import flops
from vescale_compile.runtime import leaving, ops

# A second is one operation, or one byte and a launch: times can be read off.
ARITHMETIC = Device("arithmetic", {"float32": 1.0, "bfloat16": 2.0}, 1e30, None, 1.0, 1.0, 0.0)
TRAFFIC = Device("traffic", {"float32": 1e30}, 1.0, None, 1.0, 1.0, 0.0)
LAUNCHES = Device("launches", {"float32": 1e30}, 1e30, None, 1.0, 1.0, 1.0)


def capture(run: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Graph:
    with FakeTensorMode():
        return make_fx(run, tracing_mode="fake")(*(torch.empty(shape, dtype=dtype) for shape in shapes)).graph


def total(graph: fx.Graph, device: Device, *, fused: bool = True) -> float:
    return sum(compute_seconds(graph.nodes, device, fused=fused).values())


def close(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-6, abs=1e-6)


def test_a_matrix_product_takes_two_operations_for_each_multiplication() -> None:
    assert total(capture(torch.mm, (3, 5), (5, 7)), ARITHMETIC) == close(2 * 3 * 5 * 7)
    assert total(capture(torch.mm, (3, 5), (5, 7), dtype=torch.bfloat16), ARITHMETIC) == close(3 * 5 * 7)


def test_a_product_that_writes_wider_numbers_is_computed_in_those_that_it_reads() -> None:
    def into(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(3, 7)
        ops.matmul_into(out, a, b, False)
        return out

    assert total(capture(into, (3, 5), (5, 7), dtype=torch.bfloat16), ARITHMETIC) == close(3 * 5 * 7)


def test_operations_of_a_whole_backward_are_those_that_pytorch_counts() -> None:
    def step(x: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
        x, weight, kernel = (each.detach().requires_grad_() for each in (x, weight, kernel))
        y = F.conv2d(F.linear(x, weight), kernel).square().sum()
        return torch.autograd.grad(y, [x, weight, kernel])[1]

    shapes = (2, 3, 8, 4), (6, 4), (5, 3, 3, 3)
    graph = capture(step, *shapes)
    with FlopCounterMode(display=False) as counter:
        step(*map(torch.randn, shapes))
    formulas = counter.flop_registry
    assert sum(flops(node, formulas) for node in graph.nodes) == counter.get_total_flops() > 0


@pytest.mark.parametrize("causal", [True, False])
def test_causal_attention_takes_half_the_operations(causal: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)[0]

    graph = capture(attend, *[(2, 3, 16, 8)] * 3)
    assert total(graph, ARITHMETIC) == close(2 * 3 * (2 * 2 * 16 * 16 * 8) / (2 if causal else 1))


def test_attentions_backward_has_operations_too() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.detach().requires_grad_()
        y = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(y.sum(), q)[0]

    graph = capture(step, *[(2, 3, 16, 8)] * 3)
    forward_matmul = 2 * 2 * 3 * 16 * 16 * 8
    assert total(graph, ARITHMETIC) == close((2 + 5) * forward_matmul)


def test_a_matrix_product_reads_its_factors_and_writes_its_result() -> None:
    assert total(capture(torch.mm, (3, 5), (5, 7)), TRAFFIC) == close(4 * (15 + 35 + 21))


def test_views_are_free() -> None:
    graph = capture(lambda x: x.view(6).unsqueeze(0).expand(4, 6).transpose(0, 1)[1:], (2, 3))
    assert set(compute_seconds(graph.nodes, LAUNCHES).values()) == {0.0}


def test_what_is_expanded_is_read_once() -> None:
    graph = capture(lambda x, y: torch.mm(x.expand(8, 4), y), (1, 4), (4, 2))
    assert total(graph, TRAFFIC) == close(4 * (4 + 8 + 16))


def chain(x: Tensor) -> Tensor:
    return ((x + 1).view(-1) * 2).relu()


def test_pointwise_operators_in_a_row_are_one_kernel() -> None:
    graph = capture(chain, (10, 10))
    assert total(graph, TRAFFIC) == 4 * (100 + 100)
    assert total(graph, LAUNCHES) == 1


def test_unfused_each_pointwise_operator_is_a_kernel() -> None:
    graph = capture(chain, (10, 10))
    assert total(graph, TRAFFIC, fused=False) == 4 * 3 * (100 + 100)
    assert total(graph, LAUNCHES, fused=False) == 3


def rows(x: Tensor) -> Tensor:
    return torch.arange(4, device=x.device)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.ops.aten.embedding(x, rows(x)),
        lambda x: torch.ops.aten.index(x, [rows(x)]),
        lambda x: torch.gather(x, 0, rows(x).view(4, 1)),
        lambda x: torch.ops.aten.slice_scatter(x, x[2:6], 0, 4, 8),
        lambda x: torch.ops.aten.select_scatter(x, x[0], 0, 4),
    ],
    ids=["embedding", "index", "gather", "slice_scatter", "select_scatter"],
)
def test_what_reads_by_an_index_and_what_writes_a_slice_joins_the_kernels_around_it(
    operator: Callable[[Tensor], Tensor],
) -> None:
    graph = capture(lambda x: operator(x + 1) * 2, (10, 10))
    (first,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    behind = [node for node in graph.nodes if first in node.all_input_nodes or node.target == torch.ops.aten.mul.Tensor]
    assert compute_seconds([first], TRAFFIC)[first] == 4 * 100  # read, and not written
    assert sum(compute_seconds(behind, LAUNCHES).values()) == 0


@pytest.mark.parametrize("accumulate", [True, False])
def test_what_scatters_is_a_kernel_between_those_around_it(accumulate: bool) -> None:
    """It is not complete for any reader before all of it has run."""

    def scatter(x: Tensor) -> Tensor:
        return torch.ops.aten.index_put(x + 1, [x[:, 0].long()], x, accumulate) * 2

    graph = capture(scatter, (10, 10))
    (put,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    (first, *_), (last, *_) = put.all_input_nodes, put.users
    assert compute_seconds([first, put, last], LAUNCHES) == {first: 1, put: 1, last: 1}


@pytest.mark.parametrize(("fused", "kernels"), [(True, 2), (False, 4)])
def test_the_host_launches_each_kernel_and_no_view(fused: bool, kernels: int) -> None:
    graph = capture(lambda x, y: torch.mm(chain(x).view(10, 10), y), (10, 10), (10, 10))
    device = replace(LAUNCHES, issue=3.0)
    seconds = compute_seconds(graph.nodes, device, fused=fused)
    assert sum(issue_seconds(seconds, device, fused=fused).values()) == 3 * kernels


def test_what_a_matrix_product_reads_is_written_to_memory() -> None:
    graph = capture(lambda x, y: torch.mm(x + 1, y), (10, 10), (10, 10))
    assert total(graph, TRAFFIC) == close(4 * (2 * 100 + 3 * 100))


def test_an_embedding_reads_the_rows_that_it_returns() -> None:
    def look_up(weight: Tensor, index: Tensor) -> Tensor:
        return F.embedding(index.long(), weight)

    graph = capture(look_up, (1000, 8), (5,))
    (embedding,) = graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert compute_seconds([embedding], TRAFFIC)[embedding] == 2 * 4 * 5 * 8 + 8 * 5


def test_a_gradient_written_into_its_place_costs_what_the_product_costs() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        for name, shape in (("out", (3, 7)), ("a", (3, 5)), ("b", (5, 7))):
            graph.placeholder(name).meta["val"] = torch.empty(shape)
    node = graph.call_function(torch.ops.vescale.matmul_into.default, (*graph.nodes, False))
    node.meta["val"] = None
    assert compute_seconds([node], ARITHMETIC)[node] == close(2 * 3 * 5 * 7)
    assert compute_seconds([node], TRAFFIC)[node] == close(4 * (21 + 15 + 35))


def test_collectives_are_not_computation() -> None:
    graph = fx.Graph()
    shard = graph.placeholder("shard")
    gather = graph.call_function(torch.ops.vescale.all_gather.default, (shard, 0, 2, "group"))
    with FakeTensorMode():
        shard.meta["val"], gather.meta["val"] = torch.empty(4), torch.empty(8)
    assert compute_seconds([gather], LAUNCHES) == {gather: 0.0}


@pytest.mark.parametrize("operator", [leaving.leave_reduce_scatter, leaving.cast_when_read], ids=str)
def test_what_the_backward_leaves_to_be_waited_for_takes_none_of_its_time(operator: torch._ops.OpOverload) -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        for argument in operator._schema.arguments[:-1]:
            graph.placeholder(argument.name).meta["val"] = torch.empty(8)
    node = graph.call_function(operator, (*graph.nodes, 0))
    node.meta["val"] = None
    assert compute_seconds([node], TRAFFIC) == compute_seconds([node], LAUNCHES) == {node: 0.0}


def test_symbolic_sizes_count_as_they_were_at_capture_and_are_not_guarded() -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    x, y = (mode.from_tensor(torch.empty(6, 6), static_shapes=False) for _ in range(2))
    graph = make_fx(lambda x, y: torch.mm(x.relu(), y.relu()), tracing_mode="real")(x, y).graph
    guards = len(environment.guards)
    assert total(graph, ARITHMETIC) == close(2 * 6**3)
    assert len(environment.guards) == guards


def test_float32_products_are_tf32_where_pytorch_is_told_so() -> None:
    device = Device("gpu", {"float32": 1.0, "tf32": 10.0}, 1e30, None, 1.0, 1.0, 0.0)
    graph = capture(torch.mm, (3, 5), (5, 7))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert total(graph, device) == close(21)
        torch.set_float32_matmul_precision("highest")
        assert total(graph, device) == close(210)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float16])
def test_products_take_time_in_every_dtype(dtype: torch.dtype) -> None:
    assert total(capture(torch.mm, (3, 5), (5, 7), dtype=dtype), ARITHMETIC) >= 3 * 5 * 7


def test_an_operator_whose_formula_raises_is_bound_by_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def formula(*args: object, **kwargs: object) -> int:
        raise NotImplementedError("not this one")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.mm, formula)
    monkeypatch.setattr(arithmetic, "_warned", set())
    graph = capture(lambda x, y: (torch.mm(x, y), torch.mm(x, y)), (3, 5), (5, 7))
    assert total(graph, ARITHMETIC) == close(0)
    assert total(graph, TRAFFIC) == close(2 * 4 * (15 + 35 + 21))
    (warning,) = (record.getMessage() for record in caplog.records if record.name == arithmetic.__name__)
    assert "aten.mm" in warning and "not this one" in warning


def test_products_of_groups_of_rows_take_what_products_of_all_rows_do() -> None:
    """Eight rows for three experts, and the gradient of the experts' weights."""

    def experts(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.aten._grouped_mm(rows, weights, rows.new_zeros(3, dtype=torch.int32))

    def gradient(rows: Tensor, gradients: Tensor) -> Tensor:
        return torch.ops.aten._grouped_mm(rows.t(), gradients, rows.new_zeros(3, dtype=torch.int32))

    bf16 = torch.bfloat16
    assert total(capture(experts, (8, 16), (3, 16, 32), dtype=bf16), ARITHMETIC) == close(8 * 16 * 32)
    assert total(capture(gradient, (8, 16), (8, 32), dtype=bf16), ARITHMETIC) == close(8 * 16 * 32)


def test_flex_attention_takes_what_attention_without_a_mask_does() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    shape, few_heads = (2, 4, 16, 8), (2, 2, 16, 8)
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in ("query", "key", "value")]
    program = graph.get_attr("score_mod")
    node = graph.call_function(torch.ops.higher_order.flex_attention, (*tensors, program, (), 1.0, {}))
    for each, size in zip((*tensors, node), (shape, few_heads, few_heads, shape), strict=True):
        each.meta["val"] = torch.empty(size, device="meta")
    plain = total(capture(attend, shape, shape, shape), ARITHMETIC)
    assert compute_seconds([node], ARITHMETIC)[node] == close(plain)
    assert compute_seconds([node], TRAFFIC)[node] == close(4 * (2 + 1) * 2 * 4 * 16 * 8)


@pytest.mark.parametrize("operator", ["flex_attention", "flex_attention_backward"])
def test_flex_attention_is_counted_as_pytorch_counts_it_where_it_does(operator: str) -> None:
    target = getattr(torch.ops.higher_order, operator)
    if target not in flop_registry:
        pytest.skip("this PyTorch has no formula for it")
    graph = fx.Graph()
    tensors = [graph.placeholder(name) for name in ("query", "key", "value", "out", "logsumexp", "grad_out")]
    sizes = [(2, 4, 16, 8), (2, 4, 12, 8), (2, 4, 12, 6), (2, 4, 16, 6), (2, 4, 16), (2, 4, 16, 6)]
    for each, size in zip(tensors, sizes, strict=True):
        each.meta["val"] = torch.empty(size, device="meta")
    node = graph.call_function(target, tuple(tensors[:3] if operator == "flex_attention" else tensors))
    node.meta["val"] = torch.empty(sizes[3], device="meta")
    assert flops(node, {}) == flops(node, flop_registry) > 0
