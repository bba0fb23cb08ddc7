"""Parameters that stay gathered over the micro-batches of a step."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import models
import pytest
import torch
import torch.distributed.checkpoint as dcp
from kernels import allocated_by
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import vescale_compile as vc
from vescale_compile.runtime import lasting, ops
from vescale_compile.runtime.shards import buffer_of
from vescale_compile.sharded_module import buffers_in

MICRO_BATCHES = 3


@contextlib.contextmanager
def gathered() -> Iterator[list[str]]:
    """The units that are gathered meanwhile, by graphs or in uncompiled code."""
    units: list[str] = []
    start = ops._start_all_gather

    def noting(shard, full, group):
        units.extend(buffer.name for buffer in [buffer_of(shard)] if buffer is not None)
        return start(shard, full, group)

    with mock.patch.object(ops, "_start_all_gather", noting):
        yield units


Between = Callable[[nn.Module], object]


def nothing(model: nn.Module) -> None:
    pass


def accumulate(model, call, data, between: Between = nothing) -> list[str]:
    """One step's gradients, ``between`` whose micro-batches something is done; returns what was gathered in it."""
    with gathered() as units:
        for micro_batch, (tokens, labels) in enumerate(data):
            last = micro_batch == len(data) - 1
            with contextlib.nullcontext() if last else vc.no_sync(model):
                call(tokens, labels).backward()
            if not last:
                between(model)
    return units


def assert_accumulates_as_one_rank(model, call, data, build=models.Uneven, between: Between = nothing) -> list[str]:
    """:func:`accumulate`, after a comparison with the unsharded model."""
    reference = models.build(build)
    reference.load_state_dict(models.whole(model))
    units = accumulate(model, call, data, between)
    for micro_batch, (tokens, labels) in enumerate(data):
        reference(tokens, labels).backward()
        if micro_batch < len(data) - 1:
            between(reference)
    models.average_gradients(reference)
    models.assert_gradients_of(model, reference, atol=1e-6)
    return units


def sharded(compile="eager", build=models.Uneven, **options):
    torch._dynamo.reset()
    return models.sharded(build, compile=compile, **{"reshard_after_forward": False, **options})


def by_layers(build=models.deep):
    """Each layer is a graph."""
    torch._dynamo.reset()
    model, _ = models.sharded(build, compile=None, reshard_after_forward=False)
    for layer in model.layers:
        layer.compile(backend="vescale", options={"lowering": "eager"})
    return model


def names(model) -> list[str]:
    return [buffer.name for buffer in buffers_in(model)]


@pytest.mark.parametrize("compile", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@on_ranks(2)
def test_each_unit_is_gathered_once_a_step(compile):
    model, call = sharded(compile)
    data = models.batches(MICRO_BATCHES, 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        assert sorted(assert_accumulates_as_one_rank(model, call, data)) == sorted(names(model))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_so_is_each_layer_that_is_compiled_by_itself():
    model = by_layers()
    data = models.batches(MICRO_BATCHES, 11)
    layers = [name for name in names(model) if name.startswith("layers")]
    for _ in range(3):  # from the second on, layers are gathered ahead
        units = assert_accumulates_as_one_rank(model, model, data, models.deep)
        assert [name for name in units if name in layers] == layers
        model.zero_grad()


@on_ranks(2)
def test_units_that_are_gathered_again_for_the_backward_are_for_each_micro_batch():
    model, call = sharded(reshard_after_forward=True)
    data = models.batches(MICRO_BATCHES, 11)
    units = Counter(assert_accumulates_as_one_rank(model, call, data))
    assert all(units[name] >= MICRO_BATCHES for name in names(model) if name.startswith("layers"))


@on_ranks(2)
def test_outside_no_sync_each_forward_gathers():
    model, call = sharded()
    data = models.batches(MICRO_BATCHES, 11)
    accumulate(model, call, data)
    with gathered() as units:
        for tokens, labels in data:
            call(tokens, labels).backward()
    assert Counter(units) == dict.fromkeys(names(model), MICRO_BATCHES)


@on_ranks(2)
def test_frozen_units_are_gathered_once_too():
    model, call = sharded(build=models.deep)
    model.layers.requires_grad_(False)
    units = Counter(accumulate(model, call, models.batches(MICRO_BATCHES, 11)))
    assert all(units[name] == 1 for name in names(model) if name.startswith("layers"))


@torch.no_grad()
def scale_the_head(model: nn.Module) -> None:
    model.head.weight.mul_(2.0)


@on_ranks(2)
def test_what_is_written_between_micro_batches_is_gathered_again():
    model, call = sharded()
    data = models.batches(MICRO_BATCHES, 11)
    units = Counter(assert_accumulates_as_one_rank(model, call, data, between=scale_the_head))
    (of_head,) = (buffer.name for buffer in buffers_in(model) if model.head.weight in set(buffer.params))
    assert units == {**dict.fromkeys(names(model), 1), of_head: MICRO_BATCHES}


@on_ranks(2)
def test_what_ranks_write_to_elements_of_their_own_is_refused():
    model, call = sharded()
    first, second = models.batches(2, 11)
    with vc.no_sync(model):
        call(*first).backward()
        with torch.no_grad():
            model.head.weight.to_local().mul_(2.0)
        with pytest.raises(RuntimeError, match=r"\[rank .\].*written to between micro-batches of one step"):
            call(*second)
        call(*second).backward()  # the next time it is gathered


@on_ranks(2)
def test_what_a_checkpoint_loads_between_micro_batches_is_gathered_again(tmp_path):
    model, call = sharded()
    first, second = models.batches(2, 11)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    expected = call(*second).item()
    scale_the_head(model)
    with vc.no_sync(model):
        call(*first).backward()
        dcp.load(get_model_state_dict(model), checkpoint_id=tmp_path)
        assert call(*second).item() == expected


@on_ranks(2)
def test_evaluation_between_micro_batches_changes_nothing():
    model, call = sharded()
    data = models.batches(MICRO_BATCHES, 11)

    @torch.no_grad()
    def evaluate(each: nn.Module) -> None:
        (call if each is model else each)(*data[0])

    assert_accumulates_as_one_rank(model, call, data, between=evaluate)


@on_ranks(2)
def test_a_copy_between_micro_batches_gathers_its_own():
    model, call = sharded()
    data = models.batches(2, 11)
    with vc.no_sync(model):
        call(*data[0]).backward()
    copied = copy.deepcopy(model)
    scale_the_head(copied)
    called = torch.compile(copied, backend="vescale", options={"lowering": "eager"})
    theirs, ours = called(*data[1]), call(*data[1])
    assert (theirs - ours).abs() > 1e-3


class FirstLayers(models.Uneven):
    """Only so many of its layers are used."""

    def forward(self, tokens: Tensor, labels: Tensor, layers: int) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers[:layers]:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@on_ranks(2)
def test_nothing_lasts_longer_than_a_step_though_its_last_micro_batch_does_not_read_it():
    model, call = sharded(build=FirstLayers)
    first, second = models.batches(2, 11)
    with vc.no_sync(model):
        call(*first, layers=2).backward()
    call(*second, layers=1).backward()
    assert not lasting._lasting


class Square(nn.Module):
    """One unit of one matrix, without padding; the backward computes as large a one from it, and nothing else is left
    of it then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList([Scaled()])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers[0](self.first(x)), target)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.sin() * 2.0)


@pytest.mark.slow
@on_ranks(2)
def test_generated_code_of_a_backward_writes_to_nothing_that_lasts():
    model, call = sharded("inductor", Square)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    data = [tuple(torch.randn(2, 4, 8, generator=generator)) for _ in range(MICRO_BATCHES)]
    assert assert_accumulates_as_one_rank(model, call, data, Square).count("layers.0") == 1


class ReturnsItsHead(models.Uneven):
    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(tokens, labels), self.head.weight


@on_ranks(2)
def test_what_the_program_is_given_of_them_it_may_write_to():
    model, call = sharded(build=ReturnsItsHead)
    (tokens, labels), _ = models.batches(2, 11)
    with vc.no_sync(model):
        loss, head = call(tokens, labels)
        loss.backward()
        with torch.no_grad():
            head.zero_()
        again, _ = call(tokens, labels)
    assert loss == again


class FullestFirst(nn.Module):
    """What its first layer computes is larger than anything that is there at the end of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 512)])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        wide = first(x).unsqueeze(-1).expand(-1, -1, 64) * torch.arange(64.0)  # nothing that its backward needs
        return second(wide.sum(-1)).square().mean()


@on_ranks(2)
def test_the_plan_counts_what_lasts_all_the_time():
    model, call = sharded(build=FullestFirst)
    x = torch.randn(64, 8)
    with vc.no_sync(model):
        call(x).backward()  # compiled
        (graph,) = vc.explain(model, x, options={"lowering": "eager"}).graphs
        planned = max(part.peak.nbytes for part in graph.parts.values())
        lasting_bytes = sum(unit.gathered_bytes for unit in graph.units if "later micro-batches" in unit.after_forward)
        taken = allocated_by(lambda: call(x).backward()) + lasting_bytes
    assert lasting_bytes >= 4 * 64 * 512
    assert planned == pytest.approx(taken, rel=0.03)
