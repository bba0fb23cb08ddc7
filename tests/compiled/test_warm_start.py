"""A second process finds what a first has compiled, without passes or code generation, and goes on as if it had."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from caches import cache_in
from ranks import on_ranks, run_on_ranks
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.compiled import check_agreement
from vescale_compile.passes import summarize
from vescale_compile.passes.context import CompileContext, Part
from vescale_compile.passes.summary import Summary
from vescale_compile.report import GraphReport
from vescale_compile.runtime import decisions
from vescale_compile.runtime.agreement import agree_on_graph
from vescale_compile.runtime.model import Beside

pytestmark = pytest.mark.slow  # left out of `make test-fast`

ODD = 1  # the rank that differs
BOTH = [Part.FORWARD, Part.BACKWARD]
ALL = [*BOTH, Part.INFERENCE]


@contextmanager
def empty_cache() -> Iterator[None]:
    """For this rank alone."""
    with tempfile.TemporaryDirectory() as folder, cache_in(folder):
        yield


@contextmanager
def copy_of(filled: Path) -> Iterator[Path]:
    """For this rank alone: a cache that holds what `run_small` compiles."""
    with tempfile.TemporaryDirectory() as folder, cache_in(folder):
        shutil.copytree(filled, folder, dirs_exist_ok=True)
        yield Path(folder)


@contextmanager
def passes() -> Iterator[list[Part]]:
    """The graphs that went through the passes inside, where compilers remember nothing from before."""
    torch._dynamo.reset()
    ran: list[Part] = []

    def summarized(graph: fx.Graph, context: CompileContext) -> Summary:
        ran.append(context.part)
        return summarize(graph, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_compile.backend.summarize", summarized)
        yield ran


class Products(nn.Module):
    """Of few kernels: three products, and how far they lead from the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7, bias=False) for _ in range(2))
        self.head = nn.Linear(7, 7)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = tokens[:, :7] / 11
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) - labels[:, :7] / 11).square().mean()


def trained(
    cluster=None, lowering: str | None = "inductor", steps=2, keeps_one=False, **shard_options
) -> tuple[list[float], dict, list]:
    """Losses, parameters and reports of a model that is trained for a few steps, and evaluated. It has one layer, or
    two of which it keeps the first for the backward, and no other."""
    model = models.build(Products if keeps_one else functools.partial(models.Uneven, 1))
    if keeps_one:
        vc.fully_shard(model.layers[0], reshard_after_forward=False, **shard_options)
        vc.fully_shard(model.layers[1], **shard_options)
    vc.fully_shard(model, **shard_options)
    reports: list[GraphReport] = []
    options = {"cluster": cluster, "lowering": lowering}
    backend = functools.partial(vescale, options=options, on_compiled=reports.append)
    call = torch.compile(model, backend=backend) if lowering else model
    data = models.batches(steps, 11)
    losses = models.train(call, model.parameters(), data)
    with torch.no_grad():
        losses.append(call(*data[0]).item())
    return losses, models.whole(model), reports


def run_small(size: int = 2, dynamic: bool = False, cluster=None, **shard_options) -> list[float]:
    """What a model of few kernels gives before a step, and after it without gradients."""
    model = vc.fully_shard(models.build(small), **shard_options)
    call = torch.compile(model, backend="vescale", dynamic=dynamic, options={"cluster": cluster})
    x = torch.ones(size, 13)
    loss = call(x).sum()
    loss.backward()
    models.sgd(model.parameters()).step()
    with torch.no_grad():
        return [loss.item(), call(x).sum().item()]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 13))


@functools.cache
def cold_and_warm(**options) -> tuple[list[float], list[float]]:
    """The losses of a cold start, which a warm one must repeat to the bit, with its parameters and reports; of a model
    with units that are resharded and one that is kept. And how long graphs were waited for, of both."""
    waits: list[float] = []

    def agree(*what, deadline_s: float) -> None:
        waits.append(deadline_s)
        agree_on_graph(*what, deadline_s=deadline_s)

    with empty_cache(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_compile.backend._MOST_TIMES_AS_LONG", 1e6)
        patch.setattr("vescale_compile.compiled.agree_on_graph", agree)
        with passes() as ran:
            losses, params, reports = trained(keeps_one=True, **options)
        assert ran == ALL
        after = {unit.after_forward for unit in reports[0].units}
        assert after == {"resharded", "kept", "kept: the backward reads it first"}
        with passes() as ran:
            warm_losses, warm_params, warm_reports = trained(keeps_one=True, **options)
        assert ran == []
    assert warm_losses == losses
    assert all(torch.equal(warm_params[name], param) for name, param in params.items())
    assert warm_reports == reports and len(reports) == 2
    return losses, waits


@on_ranks(2)
def test_a_warm_start_trains_and_reports_as_the_cold_one_did():
    """So does one of a quantized model: tests/quantize/test_training.py."""
    cold_and_warm()


@on_ranks(2)
def test_who_finds_what_took_long_to_compile_waits_as_long_for_who_must_compile_it():
    """As after a host has been replaced, whose ranks alone have cold caches."""
    _, (cold, _, warm, _) = cold_and_warm()
    assert cold > warm > 0.5 * cold


@pytest.fixture(scope="module")
def cold_start(tmp_path_factory) -> tuple[Path, list[tuple[list[float], list[Part]]]]:
    """A cache that two ranks have shared, with what `run_small` compiles; and each rank's losses and passes."""
    folder = tmp_path_factory.mktemp("filled")
    return folder, run_on_ranks(2, losses_and_passes, str(folder))


@pytest.fixture(scope="module")
def filled(cold_start) -> Path:
    """A cache that holds what `run_small` compiles."""
    folder, _ = cold_start
    return folder


def losses_and_passes(folder: str) -> tuple[list[float], list[Part]]:
    with cache_in(folder), passes() as ran:
        losses = run_small()
    return losses, ran


def test_another_process_finds_what_was_compiled(cold_start):
    folder, cold = cold_start
    ranks.shut_down()
    warm = run_on_ranks(2, losses_and_passes, str(folder))
    assert ALL in [ran for _, ran in cold]
    assert [ran for _, ran in warm] == [[], []]
    assert [losses for losses, _ in warm] == [losses for losses, _ in cold]


@on_ranks(2)
def test_what_a_schedule_rests_on_is_part_of_what_is_looked_for(filled):
    with copy_of(filled):
        for other in ({"cluster": models.SLOW_WIRE}, {"reshard_after_forward": False}):
            with passes() as ran:
                run_small(**other)
            assert ran == ALL
        with pytest.MonkeyPatch.context() as patch, passes() as ran:
            patch.setenv("TORCH_NCCL_NAN_CHECK", "1")  # slots lie elsewhere
            run_small()
        assert ran == ALL
        with pytest.MonkeyPatch.context() as patch, passes() as ran:
            frozen_tower = Beside(shards=1 << 20)
            patch.setattr("vescale_compile.capture.beside", lambda *_, **__: frozen_tower)
            run_small()
        assert ran == ALL
        for same in ({}, {"cluster": models.SLOW_WIRE}):
            with passes() as ran:
                run_small(**same)
            assert ran == []


@on_ranks(2)
def test_what_another_version_compiled_is_not_found(filled):
    with copy_of(filled), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_compile.warm_start.sources", lambda: "another")
        with passes() as ran:
            run_small()
    assert ran == ALL


@on_ranks(2)
def test_a_graph_that_is_dynamic_in_the_batch_is_found_for_the_batch_that_it_was_scheduled_for():
    with empty_cache():
        for size, expected in ((2, ALL), (3, ALL), (2, [])):
            with passes() as ran:
                run_small(size, dynamic=True)
            assert ran == expected


def last_to_decide(decided: dist.Store):
    """``first_decides`` on a rank that comes to every decision after another one."""

    def first_decides(mesh: DeviceMesh) -> Callable[[str, str], str]:
        decide = decisions.first_decides(mesh)

        def later(question: str, answer: str) -> str:
            decided.wait(["by the other rank"])
            return decide(question, answer)

        return later

    return first_decides


@on_ranks(2)
def test_ranks_that_decide_otherwise_compile_anew():
    free = replace(models.SLOW_WIRE, within=replace(models.SLOW_WIRE.within, bandwidth=1e15))
    store, odd = decisions.default_store(), dist.get_rank() == ODD

    def check(*args) -> None:
        store.set("by the other rank", "")
        check_agreement(*args)

    with empty_cache(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_compile.capture.cluster_for", lambda *_: models.SLOW_WIRE)
        with passes():
            losses, _, cold = trained()
        patch.setattr(decisions, "default_store", lambda: dist.PrefixStore("another job", store))
        if odd:
            patch.setattr("vescale_compile.capture.cluster_for", lambda *_: free)
            patch.setattr("vescale_compile.backend.check_agreement", check)
        else:
            patch.setattr("vescale_compile.capture.first_decides", last_to_decide(store))
        with passes() as ran:
            warm_losses, _, warm = trained()
    assert ran[:2] == BOTH
    assert warm_losses == losses
    assert schedules(warm) != schedules(cold)


def schedules(reports: list[GraphReport]) -> list[tuple[str, ...]]:
    return [part.schedule for report in reports for part in report.parts.values()]


@on_ranks(2)
def test_who_wants_to_see_the_graphs_gets_them_from_the_passes(filled, tmp_path):
    with copy_of(filled), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_DUMP", str(tmp_path))
        with passes() as ran:
            run_small()
    assert ran == ALL
    assert list(tmp_path.glob(f"rank{dist.get_rank()}/*/*-backward-after-verify.py"))


@on_ranks(2)
def test_depyf_gets_the_graphs_from_the_passes_too(filled, tmp_path):
    import depyf

    with copy_of(filled), depyf.prepare_debug(str(tmp_path / f"rank{dist.get_rank()}")), passes() as ran:
        run_small()
    assert ran == ALL


@on_ranks(2)
def test_nothing_is_kept_where_the_user_has_the_cache_off(filled):
    """Nor is what the cache has looked at."""
    with copy_of(filled) as folder, torch._functorch.config.patch(enable_autograd_cache=False):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        with passes() as ran:
            run_small()
        assert ran == ALL
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


class Bypass(nn.Module):
    """Its backward has nothing to compute: the parameters see no gradient, the input gets what the output got."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            added = self.layers[0](x)
        return x + added


@on_ranks(2)
def test_a_graph_without_computation_is_compiled_each_time():
    with empty_cache():
        for _ in range(2):
            x = torch.ones(2, 4, requires_grad=True)
            with passes() as ran:
                torch.compile(vc.fully_shard(Bypass()), backend="vescale")(x).sum().backward()
            assert ran == BOTH
            assert x.grad is not None and torch.equal(x.grad, torch.ones(2, 4))
