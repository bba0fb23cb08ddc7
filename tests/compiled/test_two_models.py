"""Two models in one compiled function, and parameters that are not sharded beside those that are."""

import functools
import logging

import models
import pytest
import torch
from ranks import fake_world, on_ranks
from torch import nn

import vescale_compile as vc
from vescale_compile import undivided

pytestmark = pytest.mark.slow  # left out of `make test-fast`

OPTIONS = {"lowering": "eager"}

one_layer = functools.partial(models.Uneven, 1)


def distilled(tokens: torch.Tensor, labels: torch.Tensor, *, sharded: bool) -> list[torch.Tensor]:
    """Gradients of a student and of its teacher, averaged over the ranks."""
    torch._dynamo.reset()
    both = [models.build(one_layer, seed) for seed in (0, 1)]
    student, teacher = map(vc.fully_shard, both) if sharded else both
    options = {"backend": "vescale", "options": OPTIONS} if sharded else {"backend": "eager"}
    torch.compile(lambda: (student(tokens, labels) - teacher(tokens, labels)).square(), **options)().backward()
    params = [*student.parameters(), *teacher.parameters()]
    if sharded:
        return [param.grad.full_tensor() for param in params]
    models.average_gradients(student)
    models.average_gradients(teacher)
    return [param.grad for param in params]


@on_ranks(2)
def test_a_student_and_a_teacher_in_one_graph_have_the_gradients_of_unsharded_ones():
    data = models.batches(1, 11)[0]
    for ours, theirs in zip(distilled(*data, sharded=True), distilled(*data, sharded=False), strict=True):
        assert torch.equal(ours, theirs)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList(vc.fully_shard(models.build(models.Uneven)) for _ in range(2))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.models[0](tokens, labels) + self.models[1](tokens, labels)


def test_units_of_two_models_are_told_apart_in_the_report():
    with fake_world(2):
        torch._dynamo.reset()
        (graph,) = vc.explain(Both(), *models.batches(1, 11)[0], options=OPTIONS).graphs
    names = [unit.name for unit in graph.units]
    assert len(set(names)) == len(names) == 6
    assert names.count("layers.1") == names.count("layers.1 of model 2") == 1


@pytest.fixture
def warnings_of(caplog):
    """What is logged while a model of two ranks is trained for a step."""

    def log(model: nn.Module, *, compiled: bool = True) -> str:
        torch._dynamo.reset()
        with caplog.at_level(logging.WARNING):
            run = torch.compile(model, backend="vescale", options=OPTIONS) if compiled else model
            run(*models.batches(1, 11)[0]).backward()
        return caplog.text

    return log


@pytest.mark.parametrize("compiled", [True, False])
def test_a_parameter_that_was_added_after_sharding_is_named_once(warnings_of, compiled):
    with fake_world(2):
        model = vc.fully_shard(models.build(one_layer))
        model.head = nn.Sequential(model.head, nn.Linear(11, 11, bias=False))
        warnings_of(model, compiled=compiled)
        logged = warnings_of(model, compiled=compiled)
    assert logged.count("are not averaged") == 1
    assert "There are 1: head.1.weight (11, 11)." in logged


class Broken(nn.Module):
    """A graph break, and behind it what a graph of its own trains."""

    def __init__(self) -> None:
        super().__init__()
        self.model = vc.fully_shard(models.build(one_layer))
        self.adapter = nn.Linear(1, 1)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens, labels).reshape(1)
        torch._dynamo.graph_break()
        return self.adapter(loss).sum()


def test_parameters_that_a_graph_trains_without_sharded_ones_are_named(warnings_of):
    with fake_world(2):
        assert "There are 2: adapter.weight (1, 1), adapter.bias (1,)." in warnings_of(Broken())


def test_a_model_that_was_not_sharded_is_named_where_another_was(warnings_of):
    with fake_world(2):
        vc.fully_shard(models.build(one_layer))
        assert "layers.0." in warnings_of(models.build(one_layer))


def test_what_is_evaluated_may_stay_unsharded(warnings_of):
    with fake_world(2):
        model = vc.fully_shard(models.build(one_layer))
        teacher = models.build(one_layer)

        class Distilled(nn.Module):
            def forward(self, tokens, labels):
                with torch.no_grad():
                    wanted = teacher(tokens, labels)
                torch._dynamo.graph_break()
                return (model(tokens, labels) - wanted).square()

        assert "are not averaged" not in warnings_of(Distilled())


def test_many_parameters_that_were_added_after_sharding_are_one_warning(warnings_of):
    with fake_world(2):
        model = vc.fully_shard(models.build(one_layer))
        model.head = nn.Sequential(model.head, *(nn.Linear(11, 11, bias=False) for _ in range(6)))
        logged = warnings_of(model)
    assert logged.count("are not averaged") == 1
    assert "There are 6: " in logged and logged.count("(11, 11)") < 6 and ", ..." in logged


@pytest.mark.parametrize("compiled", [True, False])
def test_ignored_and_frozen_parameters_may_stay_unsharded(warnings_of, compiled):
    with fake_world(2):
        model = models.build(one_layer)
        vc.fully_shard(model, ignored_params=set(model.head.parameters()))
        model.embed = nn.Sequential(model.embed, nn.Linear(13, 13).requires_grad_(False))
        assert "are not averaged" not in warnings_of(model, compiled=compiled)


def test_what_a_refused_call_was_to_ignore_is_named(warnings_of):
    with fake_world(2):
        model = models.build(one_layer)
        with pytest.raises(TypeError, match="granularity"):
            vc.fully_shard(model, ignored_params=model.head.parameters(), granularity=lambda name, param: "a row")
        vc.fully_shard(model.layers[0])
        assert "head." in warnings_of(model)


def test_one_rank_averages_with_nobody(warnings_of):
    with fake_world(1):
        model = vc.fully_shard(models.build(one_layer))
        model.head = nn.Sequential(model.head, nn.Linear(11, 11))
        assert "are not averaged" not in warnings_of(model)


@pytest.mark.parametrize("container", [nn.Sequential, nn.ModuleList])
def test_a_model_that_is_one_unit_is_warned_of(caplog, monkeypatch, container):
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = container(*([blocks] if container is nn.ModuleList else blocks))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum()

    blocks = [nn.Linear(8, 8) for _ in range(3)]
    monkeypatch.setattr(undivided, "_MUCH_BYTES", 64)
    undivided._warn.cache_clear()
    torch._dynamo.reset()
    with fake_world(2), caplog.at_level(logging.WARNING):
        torch.compile(vc.fully_shard(Blocks()), backend="vescale", options=OPTIONS)(torch.ones(2, 8))
    assert ("unit (root) is nearly the whole model" in caplog.text) == (container is nn.Sequential)


@on_ranks(2)
def test_a_parameter_that_is_asked_for_by_name_in_a_forward_is_whole():
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.get_parameter("linear.weight")

    x = torch.ones(2, 4)
    expected = models.build(ByName)(x)
    model = vc.fully_shard(models.build(ByName))
    assert isinstance(model.get_parameter("linear.weight"), vc.RaggedDTensor)
    assert torch.equal(model(x), expected)
    assert torch.equal(torch.compile(model, backend="vescale", options=OPTIONS)(x), expected)
