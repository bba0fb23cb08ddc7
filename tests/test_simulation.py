"""``vc.simulate``: predictions for clusters that are not there."""

import functools
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from gpus import at_once
from ranks import fake_world, run_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.cost import OPTIMIZERS, Cluster, MeasuredCollective, gpu_cluster, host
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.hardware import cluster_for
from vescale_compile.passes.context import GraphError, Part
from vescale_compile.runtime import pool
from vescale_compile.simulation import Simulation
from vescale_compile.torch_internals.tracing import is_fake

pytestmark = pytest.mark.slow  # left out of `make test-fast`

H100 = gpu_cluster("h100", 8)
AT_ONCE = at_once(H100)
SLOW = replace(H100, within=replace(H100.within, bandwidth=1e6))


CONFIG = LlamaConfig(layers=1, dim=32, heads=4, kv_heads=2)


class Layers(nn.Module):
    """What takes little time to compile, where it makes no difference what a model computes."""

    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def simulated(model: nn.Module | None = None, **options) -> Simulation:
    if model is None:
        with torch.device("meta"):
            model = Llama(CONFIG)
    tokens = torch.empty(2, 16, dtype=torch.int64, device="meta")
    return vc.simulate(model, tokens, tokens, **{"cluster": H100, "world_size": 8, **options})


def of_layers(model: nn.Module | None = None, rows: int = 2, **options) -> Simulation:
    if model is None:
        with torch.device("meta"):
            model = Layers()
    x = torch.empty(rows, model.layers[0].in_features, device="meta")
    return vc.simulate(model, x, **{"cluster": H100, "world_size": 8, **options})


@pytest.fixture(scope="module")
def usual() -> Simulation:
    return simulated()


@pytest.fixture(scope="module")
def fed() -> Simulation:
    """Of devices whose hosts launch in no time."""
    return simulated(cluster=AT_ONCE)


def test_a_step_is_computation_what_is_exposed_and_the_optimizers(usual):
    found = usual
    (graph,) = found.graphs
    assert graph.parts.keys() == {Part.FORWARD, Part.BACKWARD}
    parts = found.compute_seconds + found.exposed_seconds + found.starved_seconds + found.optimizer_seconds
    assert found.step_seconds == pytest.approx(parts)
    assert found.least_seconds <= found.step_seconds
    assert found.optimizer_seconds > 0


def test_nothing_is_computed_during_launches():
    def taking(seconds: float) -> Simulation:
        measured = {kind: MeasuredCollective(1e-6, 1e12, launch=seconds) for kind in ("all_gather", "reduce_scatter")}
        return of_layers(cluster=replace(H100, measured=measured))

    none, long = taking(0.0), taking(1.0)
    spans = [span for part in long.graphs[0].parts.values() for span in part.prediction.transfers]
    launches = sum(len(span.what.split(" + ")) for span in spans)
    assert long.step_seconds - none.step_seconds == pytest.approx(launches, rel=1e-3)


def test_the_device_starves_where_its_host_takes_longer_and_the_simulation_says_so(usual, fed):
    starved = usual
    assert starved.starved_seconds > 0 == fed.starved_seconds
    assert fed.step_seconds < starved.step_seconds
    assert re.search(r"starved +[1-9]", str(starved)) and re.search(r"starved +0", str(fed))


def test_a_host_takes_time_for_each_parameter_before_the_forward_after_the_backward_and_in_the_update(usual, fed):
    with torch.device("meta"):
        parameters = len(list(Llama(CONFIG).parameters()))
    (graph,) = usual.graphs
    (fed_graph,) = fed.graphs
    each = {part: summary.prediction.issued / parameters for part, summary in graph.parts.items()}
    assert each[Part.FORWARD] > host.PARAMETER_READ and each[Part.BACKWARD] > host.PARAMETER_GRADIENT
    graphs = sum(each.values()) * parameters
    assert usual.step_seconds >= graphs + parameters * host.PARAMETER_UPDATE
    assert {summary.prediction.issued for summary in fed_graph.parts.values()} == {0.0}


def test_a_model_is_cut_as_for_the_devices_that_it_is_simulated_on():
    """Parts of a layer have 2 MiB and more: enough on a CPU, and not on a GPU."""

    def parts_on(cluster: Cluster) -> int:
        with torch.device("meta"):
            model = Layers(1)
            model.layers[0] = nn.Sequential(*(nn.Linear(768, 768, bias=False) for _ in range(4)))
            x = torch.empty(2, 768)
        (graph,) = vc.simulate(model, x, cluster=cluster, world_size=8).graphs
        return sum(unit.name.startswith("layers.0") for unit in graph.units)

    assert parts_on(H100) == 1
    assert parts_on(cluster_for(None, torch.device("cpu"), 8)) == 4


@functools.cache
def of_wide_layers(bandwidth: float = H100.within.bandwidth, budget: int | None = None) -> Simulation:
    with torch.device("meta"):
        model = Layers(12, width=1024)
    cluster = replace(AT_ONCE, within=replace(H100.within, bandwidth=bandwidth))
    return of_layers(model, rows=4096, cluster=cluster, memory_budget=budget)


@pytest.mark.parametrize("bandwidth", [H100.within.bandwidth, 2e9])
def test_no_step_takes_less_than_the_bound_and_one_whose_units_are_alike_hardly_more(bandwidth):
    found = of_wide_layers(bandwidth)
    assert found.least_seconds <= found.step_seconds <= 1.05 * found.least_seconds


def test_a_budget_that_the_usual_schedule_fits_in_makes_no_step_slower():
    """What is kept for the backward leaves room to gather ahead, or is not kept."""
    usual = of_wide_layers()
    taken = usual.peak_bytes - usual.state_bytes
    some = [of_wide_layers(budget=round(taken * share)) for share in (1.005, 1.2)]
    assert all(each.step_seconds <= 1.005 * usual.step_seconds for each in some)
    assert some[-1].communication_seconds < 0.9 * usual.communication_seconds


def test_a_slow_wire_exposes_communication_and_computes_as_long(usual):
    fast, slow = usual, simulated(cluster=SLOW)
    assert slow.compute_seconds == fast.compute_seconds
    assert slow.exposed_seconds > 100 * fast.exposed_seconds
    assert slow.step_seconds > slow.communication_seconds > fast.communication_seconds


def test_more_ranks_have_smaller_shards_and_states(usual):
    few, many = usual, simulated(world_size=64)
    assert many.cluster.nodes == 8
    assert many.trained_bytes < few.trained_bytes / 7
    assert many.state_bytes == 2 * many.trained_bytes


def test_a_model_is_simulated_over_replicas(usual):
    """Of two nodes, each of which shards it."""

    def shard(model: nn.Module) -> nn.Module:
        return vc.fully_shard(model, mesh=init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard")))

    alone, twice = usual, simulated(cluster="h100", world_size=16, shard=shard)
    assert twice.trained_bytes == alone.trained_bytes
    assert twice.communication_seconds > alone.communication_seconds


def test_the_optimizers_states_and_time_are_those_of_its_description(usual):
    adamw, sgd = usual, replace(usual, optimizer=OPTIMIZERS["sgd"])
    assert adamw.peak_bytes - sgd.peak_bytes == adamw.state_bytes == 2 * adamw.trained_bytes
    assert sgd.optimizer_seconds < adamw.optimizer_seconds


def test_the_prediction_is_what_explain_says_of_the_sharded_model(usual):
    with fake_world(8):
        model = vc.fully_shard(Llama(CONFIG))
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        torch._dynamo.reset()
        (graph,) = vc.explain(model, tokens, tokens, options={"cluster": H100}).graphs
    assert str(graph).splitlines() == str(usual.graphs[0]).splitlines()


def test_a_model_is_left_as_it_is_and_no_process_group_remains():
    model = Layers()
    before = {name: (type(param), param.data_ptr()) for name, param in model.named_parameters()}
    of_layers(model)
    assert {name: (type(param), param.data_ptr()) for name, param in model.named_parameters()} == before
    assert not dist.is_initialized()


def test_models_that_run_beside_it_do_not_share_its_memory():
    with fake_world(8):
        call = torch.compile(vc.fully_shard(Layers()), backend="vescale", options={"lowering": "eager"})
        x = torch.ones(2, 64)
        before = call(x).item()
        simulated()  # of larger units
        assert call(x).item() == before
        assert pool._memories and not any(is_fake(memory.tensor) for memory in pool._memories.values())


def test_tied_parameters_stay_tied():
    with torch.device("meta"):
        model = Layers()
    model.layers[0].weight = model.layers[1].weight
    numel = sum(param.numel() for param in model.parameters())
    assert of_layers(model).trained_bytes <= 4 * numel / 8 + 64


def test_the_model_is_sharded_as_asked():
    def each_layer_kept(model: nn.Module) -> None:
        vc.fully_shard(model, reshard_after_forward=False)

    with torch.device("meta"):  # of few layers one ahead is all
        model = Layers(6)
    kept, resharded = of_layers(model, shard=each_layer_kept), of_layers(model)
    assert {unit.after_forward for unit in kept.graphs[0].units} == {"kept"}
    assert kept.communication_seconds < resharded.communication_seconds
    assert kept.peak_bytes > resharded.peak_bytes


@pytest.mark.parametrize(("cluster", "cast"), [("h100", False), ("mi300x", True)])
def test_products_are_cast_to_fp32_where_the_clusters_library_does_not_write_it(cluster, cast):
    policy = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard = functools.partial(vc.fully_shard, mp_policy=policy)
    found = of_layers(cluster=gpu_cluster(cluster, 8), shard=shard)
    assert ("aten.mm.default gives another dtype" in str(found.graphs[0])) is cast


def test_in_evaluation_there_is_a_forward_alone():
    with torch.no_grad():
        assert of_layers().graphs[0].parts.keys() == {Part.INFERENCE}


def test_the_text_has_step_bound_and_memory(usual):
    text = str(usual)
    for words in ("8 x h100 on 1 node over NVLink", "step", "lower bound", "exposed", "peak memory", "adamw"):
        assert words in text


def test_a_step_that_lacks_memory_of_the_device_is_said_to(usual):
    small = replace(H100, device=replace(H100.device, memory_bytes=usual.peak_bytes - 100))
    found = replace(usual, cluster=small)
    assert (usual.lacking_bytes, found.lacking_bytes) == (0, 100)
    assert "too much by" in str(found) and "too much by" not in str(usual)


def test_a_sharded_model_is_refused():
    with fake_world(8), pytest.raises(ValueError, match="simulate: the model is sharded already"):
        of_layers(vc.fully_shard(Layers()))


def test_a_function_that_shards_nothing_is_refused():
    with pytest.raises(ValueError, match=r"simulate: shard\(model\) sharded nothing"):
        of_layers(shard=lambda model: None)


def test_an_argument_of_fully_shard_is_not_given_to_the_model_unseen():
    class TakesAnything(nn.Linear):
        def forward(self, x: Tensor, **_: object) -> Tensor:
            return super().forward(x)

    with pytest.raises(ValueError, match="simulate: mp_policy is an argument of fully_shard"):
        vc.simulate(TakesAnything(4, 4), torch.ones(1, 4), cluster="h100", world_size=8, mp_policy=None)


def test_the_last_node_may_have_fewer_ranks():
    assert "12 x h100 on 2 nodes" in str(of_layers(world_size=12))


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="a cluster of 0 ranks"):
        of_layers(world_size=0)


def test_a_budget_that_nothing_fits_in_is_an_error_of_the_graph():
    with pytest.raises(GraphError, match=r"\[rank 0\] .*memory_budget is .* needs"):
        of_layers(memory_budget="1KB")
    assert not dist.is_initialized()


def test_a_budget_that_is_none_is_an_error_of_its_own():
    with pytest.raises(ValueError, match=r"memory_budget.*much"):
        of_layers(memory_budget="much")


def test_a_budget_may_be_a_share_of_the_devices_memory_less_two_states_of_what_trains():
    with torch.device("meta"):
        model = Layers(4)
    model.layers[1:].requires_grad_(False)
    budgeted = functools.partial(of_layers, model)
    states = 2 * 4 * 64 * 64 // 8
    for nbytes in (200_000, 100_000):
        cluster = replace(AT_ONCE, device=replace(AT_ONCE.device, memory_bytes=nbytes))
        expected = budgeted(cluster=cluster, memory_budget=nbytes // 2 - states)
        assert budgeted(cluster=cluster, memory_budget="50%") == expected
    with pytest.raises(GraphError, match=r"\[rank 0\] .*memory_budget='1%': that is 1.0 kB, .* alone take 4.1 kB"):
        budgeted(cluster=cluster, memory_budget="1%")


def test_a_share_of_memory_that_nobody_knows_is_an_error():
    with pytest.raises(GraphError, match=r"\[rank 0\] .*memory_budget='90%': how much memory 'cpu' has .* give bytes"):
        of_layers(cluster=cluster_for(None, torch.device("cpu"), 8), memory_budget="90%")


def test_a_fake_group_of_another_size_is_refused():
    with fake_world(4), pytest.raises(RuntimeError, match=r"in a fake process group of 4 ranks.* a fake one of 8"):
        of_layers()


def refused_on_a_rank() -> str:
    try:
        of_layers()
    except RuntimeError as error:
        return str(error)
    return ""


def test_in_a_fake_group_of_the_programs_own_too_each_prediction_stands_for_itself():
    def within(budget: int | None, rows: int) -> Simulation:
        with torch.device("meta"):
            model = Layers(4)
        return of_layers(model, rows, cluster=SLOW, memory_budget=budget)

    def kept(found: Simulation) -> set[str]:
        return {unit.name for unit in found.graphs[0].units if unit.after_forward == "kept: memory_budget allows it"}

    many = 512  # which leave no room to keep anything
    needed = within(None, many)
    budget = needed.peak_bytes - needed.state_bytes - 40_000
    expected = within(budget, 2)
    with fake_world(8):
        assert not kept(within(budget, many)) and kept(expected)
        assert within(budget, 2) == expected


def test_a_real_process_group_is_refused_and_the_rank_named():
    for rank, message in enumerate(run_on_ranks(2, refused_on_a_rank)):
        assert message.startswith(f"[rank {rank}] simulate: this process is in a gloo process group of 2 ranks")


class Uncompiled(Layers):
    """Its last layer is called outside of compiled code."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.compiler.disable(self.layers[1])(torch.tanh(self.layers[0](x))).sum()


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
def test_what_is_not_compiled_is_in_no_prediction_as_a_warning_says() -> None:
    with torch.device("meta"):
        model = Uncompiled()
    with pytest.warns(UserWarning, match=r"'layers\.1\.weight' .* is read outside of compiled code .* no prediction"):
        found = of_layers(model)
    assert {unit.name for graph in found.graphs for unit in graph.units} == {"layers.0"}
