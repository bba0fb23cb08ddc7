"""``no_sync``: gradients accumulate, and one reduction ends it."""

from collections import Counter

import models
import pytest
import torch
from ranks import on_ranks
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc
from vescale_compile.sharded_module import buffers_in

MICRO_BATCHES = 3


def accumulate(model, call, data) -> None:
    with vc.no_sync(model):
        for tokens, labels in data[:-1]:
            call(tokens, labels).backward()
    tokens, labels = data[-1]
    call(tokens, labels).backward()


def accumulate_unsharded(model, data) -> None:
    call = torch.compile(model, backend="aot_eager")
    for tokens, labels in data:
        call(tokens, labels).backward()
    models.average_gradients(model)


def gradients_differ(model, reference) -> float:
    return max(
        (p.grad.full_tensor() - q.grad).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_accumulated_gradients_are_bit_equal_to_the_unsharded_models(compile):
    torch._dynamo.reset()
    data = models.batches(MICRO_BATCHES, 11)
    model, call = models.sharded(models.Uneven, compile=compile)
    reference = models.build(models.Uneven)
    for _ in range(2):
        accumulate(model, call, data)
        accumulate_unsharded(reference, data)
        assert gradients_differ(model, reference) == 0.0
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_each_unit_is_reduced_once_for_all_micro_batches(compile):
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven, compile=compile)
    data = models.batches(MICRO_BATCHES, 11)
    accumulate(model, call, data)  # compiles
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        accumulate(model, call, data)
    ran = Counter(event.name for event in trace.events())
    assert ran["vescale::reduce_scatter"] + ran["vescale::start_reduce_scatter"] == 3, ran


@on_ranks(2)
def test_inside_no_sync_no_gradient_arrives():
    model, call = models.sharded(models.Uneven)
    with vc.no_sync(model):
        call(*models.batches(1, 11)[0]).backward()
    assert {p.grad for p in model.parameters()} == {None}
    assert all(buffer.unreduced is not None for buffer in buffers_in(model))


@on_ranks(2)
def test_forwards_first_and_backwards_later_lose_nothing():
    data = models.batches(2, 11)
    model, call = models.sharded(models.Uneven)
    with vc.no_sync(model):
        first = call(*data[0])
    second = call(*data[1])
    first.backward()
    second.backward()
    reference = models.build(models.Uneven)
    accumulate_unsharded(reference, data)
    assert gradients_differ(model, reference) < 1e-7


@on_ranks(2)
def test_a_parameter_that_only_earlier_micro_batches_used_gets_its_gradient():
    class Optional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x, both):
            x = self.always(x)
            return (self.sometimes(x) if both else x).sum()

    model, call = models.sharded(Optional)
    with vc.no_sync(model):
        call(torch.ones(2, 3), True).backward()
    call(torch.ones(2, 3), False).backward()
    reference = models.build(Optional)
    for both in (True, False):
        reference(torch.ones(2, 3), both).backward()
    models.average_gradients(reference)
    assert gradients_differ(model, reference) < 1e-6


class SkipsALayer(models.Uneven):
    """Uses its second block only when told to."""

    def forward(self, tokens, labels, both):
        x = self.layers[0](self.embed(tokens))
        x = self.layers[1](x) if both else x
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Layers(torch.nn.Module):
    """Has no parameters but those of its layers, and uses as many layers as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))

    def forward(self, x, depth):
        for layer in self.layers[:depth]:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_a_unit_that_only_earlier_micro_batches_used_gets_its_gradient_at_once(compile):
    torch._dynamo.reset()
    model, call = models.sharded(SkipsALayer, compile=compile)
    data = models.batches(2, 11)
    with vc.no_sync(model):
        call(*data[0], True).backward()
    call(*data[1], False).backward()
    reference = models.build(SkipsALayer)
    for batch, both in zip(data, (True, False), strict=True):
        reference(*batch, both).backward()
    models.average_gradients(reference)
    assert gradients_differ(model, reference) < 1e-6


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_one_backward_may_run_through_forwards_inside_and_outside(compile):
    torch._dynamo.reset()
    data = models.batches(2, 11)
    model, call = models.sharded(models.Uneven, compile=compile)
    reference = models.build(models.Uneven)
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        with vc.no_sync(model):
            first = call(*data[0])
        (first + call(*data[1])).backward()
        accumulate_unsharded(reference, data)
        assert gradients_differ(model, reference) < 1e-7


@on_ranks(2)
def test_inside_no_sync_of_a_model_there_may_be_that_of_a_part():
    """The last micro-batch uses that part alone, and reduces what the others accumulated for the rest."""
    model, call = models.sharded(Layers)
    x = torch.ones(2, 3)
    with vc.no_sync(model):
        call(x, 2).backward()
        with vc.no_sync(model.layers[0]):
            call(x, 2).backward()
    call(x, 1).backward()
    reference = models.build(Layers)
    for depth in (2, 2, 1):
        reference(x, depth).backward()
    models.average_gradients(reference)
    assert gradients_differ(model, reference) < 1e-6


@on_ranks(2)
def test_zero_grad_forgets_what_was_accumulated():
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven)
    data = models.batches(2, 11)
    with vc.no_sync(model):
        call(*data[0]).backward()
    model.zero_grad()
    call(*data[1]).backward()
    reference = models.build(models.Uneven)
    accumulate_unsharded(reference, data[1:])
    assert gradients_differ(model, reference) == 0.0


@on_ranks(2)
def test_so_it_does_where_all_parameters_are_those_of_modules_inside():
    model, call = models.sharded(Layers)
    with vc.no_sync(model):
        call(torch.ones(2, 3), 2).backward()
    model.zero_grad()
    assert all(buffer.unreduced is None for buffer in buffers_in(model))


def test_no_sync_of_a_module_that_is_not_sharded_says_so():
    with pytest.raises(ValueError, match="fully_shard"), vc.no_sync(torch.nn.Linear(2, 2)):
        pass
