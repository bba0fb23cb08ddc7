"""``no_sync``: gradients accumulate, and one reduction ends it."""

import contextlib
import copy
import functools
from unittest import mock

import models
import pytest
import torch
from kernels import allocated_by
from ranks import on_ranks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import vescale_compile as vc
from vescale_compile.runtime import collectives
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`

MICRO_BATCHES = 3


one_layer = functools.partial(models.Uneven, 1)


@functools.cache
def _uneven(compile: str | None) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch._dynamo.reset()
    return models.sharded(models.Uneven, compile=compile)


def uneven(compile: str | None = "eager") -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model that this rank has compiled once for all tests that leave its parameters alone, without gradients."""
    model, call = _uneven(compile)
    model.zero_grad()
    return model, call


def accumulate(model, call, data) -> None:
    with vc.no_sync(model):
        for tokens, labels in data[:-1]:
            call(tokens, labels).backward()
    tokens, labels = data[-1]
    call(tokens, labels).backward()


def accumulate_unsharded(model, data) -> None:
    for tokens, labels in data:
        model(tokens, labels).backward()
    models.average_gradients(model)


def gradients_differ(model, reference) -> float:
    return max(
        (p.grad.full_tensor() - q.grad).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_accumulated_gradients_are_bit_equal_to_the_unsharded_models(compile):
    data = models.batches(MICRO_BATCHES, 11)
    model, call = uneven(compile)
    reference = models.build(models.Uneven)
    for _ in range(2):
        accumulate(model, call, data)
        accumulate_unsharded(reference, data)
        assert gradients_differ(model, reference) == 0.0
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2)
def test_what_is_compiled_may_call_backward_itself():
    torch._dynamo.reset()
    data = models.batches(MICRO_BATCHES, 11)
    model, _ = models.sharded(one_layer, compile=None)

    @torch.compile(backend="vescale", options={"lowering": "eager"})
    def step(tokens, labels):
        model(tokens, labels).backward()

    with vc.no_sync(model):
        for batch in data[:-1]:
            step(*batch)
    step(*data[-1])
    reference = models.build(one_layer)
    accumulate_unsharded(reference, data)
    assert gradients_differ(model, reference) == 0.0


class KeepsABuffer(torch.autograd.Function):
    """A program's own, whose context has an attribute of the name that ours has."""

    @staticmethod
    def forward(ctx, x):
        ctx.buffer = x.new_ones(())
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.buffer


@on_ranks(2)
def test_gradients_accumulate_behind_an_autograd_function_of_the_program():
    torch._dynamo.reset()
    model = vc.fully_shard(torch.nn.Linear(8, 4))
    call = torch.compile(model, backend="vescale", options={"lowering": "eager"})
    x = torch.ones(2, 8, requires_grad=True)
    with vc.no_sync(model):
        call(KeepsABuffer.apply(x)).sum().backward()
    call(KeepsABuffer.apply(x)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 8), 4.0))
    assert torch.equal(x.grad, 2 * model.weight.full_tensor().sum(0).expand(2, 8))


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_each_unit_is_reduced_once_for_all_micro_batches(compile):
    model, call = uneven(compile)
    data = models.batches(MICRO_BATCHES, 11)
    accumulate(model, call, data)  # compiles
    reduce = collectives._reduce_by_exchange
    with mock.patch.object(collectives, "_reduce_by_exchange", side_effect=reduce) as reductions:
        accumulate(model, call, data)
    assert reductions.call_count == len(buffers_in(model)) == 3


@on_ranks(2)
def test_the_last_micro_batch_launches_reductions_as_its_schedule_says():
    """In its graph, and not when the graph has ended: the sum is that of the unit whose gradients are computed."""
    model, call = uneven()
    data = models.batches(MICRO_BATCHES, 11)
    accumulate(model, call, data)  # compiles
    with vc.no_sync(model):
        call(*data[0]).backward()
    loss = call(*data[1])
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        loss.backward()
    launches = [event for event in trace.events() if event.name == "vescale::start_reduce_scatter"]
    sends = [event for event in trace.events() if event.name == "c10d::send"]
    assert len(launches) == 3
    assert sum(send.cpu_parent in launches for send in sends) == 3
    assert all(launch.cpu_parent.name == "CompiledFunctionBackward" for launch in launches)


@on_ranks(2)
def test_micro_batches_that_accumulate_compile_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, call = models.sharded(one_layer)
    for _ in range(2):
        accumulate(model, call, models.batches(MICRO_BATCHES, 11))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@on_ranks(2)
def test_gradients_that_are_held_back_take_no_memory_beside_the_sum():
    """A unit's gradients are added as soon as they are computed, and those of the next lie in their place."""
    torch._dynamo.reset()
    model, call = models.sharded(models.deep)
    data = models.batches(1, 11)[0]

    def taken() -> int:
        loss = call(*data)
        return allocated_by(loss.backward)

    with vc.no_sync(model):
        call(*data).backward()
        held_back = taken()
    call(*data).backward()
    model.zero_grad()
    assert held_back <= taken()


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_autograds_anomaly_mode_finds_nothing_in_gradients_that_are_held_back(compile):
    torch._dynamo.reset()
    model, call = models.sharded(one_layer, compile=compile)
    torch.use_deterministic_algorithms(True)  # which fills what is not initialized with NaN
    try:
        with torch.autograd.set_detect_anomaly(True):
            accumulate(model, call, models.batches(2, 11))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(param.grad.full_tensor().isfinite().all() for param in model.parameters())


@on_ranks(2)
def test_inside_no_sync_no_gradient_arrives():
    model, call = uneven()
    with vc.no_sync(model):
        call(*models.batches(1, 11)[0]).backward()
    assert {p.grad for p in model.parameters()} == {None}
    assert all(buffer.reductions.unreduced is not None for buffer in buffers_in(model))


@on_ranks(2)
def test_a_step_for_which_all_gradients_are_held_back_is_refused():
    model, call = models.sharded(models.Uneven, compile=None)
    optimizer = models.adamw(model.parameters())
    with vc.no_sync(model):
        call(*models.batches(1, 11)[0]).backward()
    with pytest.raises(RuntimeError, match=r"AdamW: none .* no_sync holds back those of unit .* outside no_sync"):
        optimizer.step()
    optimizer.step(lambda: call(*models.batches(1, 11)[0]).backward())  # which reduces
    optimizer.zero_grad()
    with vc.no_sync(model):
        call(*models.batches(1, 11)[0]).backward()
    model.zero_grad()
    optimizer.step()


@on_ranks(2)
def test_forwards_first_and_backwards_later_lose_nothing():
    data = models.batches(2, 11)
    model, call = uneven()
    with vc.no_sync(model):
        first = call(*data[0])
    second = call(*data[1])
    first.backward()
    second.backward()
    reference = models.build(models.Uneven)
    accumulate_unsharded(reference, data)
    assert gradients_differ(model, reference) < 1e-7


@on_ranks(2)
def test_a_parameter_that_only_earlier_micro_batches_used_gets_its_gradient_and_its_hooks_run():
    class Optional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x, both):
            x = self.always(x)
            return (self.sometimes(x) if both else x).sum()

    model, call = models.sharded(Optional)
    hooked = []
    model.sometimes.weight.register_hook(hooked.append)
    with vc.no_sync(model):
        call(torch.ones(2, 3), True).backward()
    call(torch.ones(2, 3), False).backward()
    assert len(hooked) == 1
    reference = models.build(Optional)
    for both in (True, False):
        reference(torch.ones(2, 3), both).backward()
    models.average_gradients(reference)
    assert gradients_differ(model, reference) < 1e-6


class BreaksInAUnit(torch.nn.Module):
    """One unit, which two graphs read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.tanh(x)).sum()


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_a_parameters_hooks_get_the_sum_once_whatever_graphs_have_computed_it(compile):
    torch._dynamo.reset()
    model, call = models.sharded(BreaksInAUnit, compile=compile)
    reference = models.build(BreaksInAUnit)
    seen = []
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.append(name) or 2 * grad)
        param.register_post_accumulate_grad_hook(lambda param: seen.append(None))
    with vc.no_sync(model):
        call(torch.ones(2, 3)).backward()
    assert not seen
    call(torch.ones(2, 3)).backward()
    assert sorted(filter(None, seen)) == sorted(name for name, _ in model.named_parameters())
    assert seen.count(None) == len(seen) / 2
    for _ in range(4):
        reference(torch.ones(2, 3)).backward()
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
def test_gradients_that_nobody_asked_for_are_not_accumulated_nor_take_what_was(compile):
    """An adversarial step, say: of a graph, which computes all of them."""
    torch._dynamo.reset()
    model, call = models.sharded(Layers, compile=compile)
    reference = models.build(Layers)
    x = torch.ones(2, 3, requires_grad=True)
    with vc.no_sync(model):
        call(x, 2).backward()
        torch.autograd.grad(call(x, 2), x)
    torch.autograd.grad(call(x, 2), x)
    call(x, 2).backward()
    for _ in range(2):
        reference(x.detach(), 2).backward()
    models.average_gradients(reference)
    assert gradients_differ(model, reference) < 1e-6


def backward_of_some(loss, some) -> None:
    loss.backward(inputs=some)


@pytest.mark.parametrize(
    ("compile", "inside", "ask"),
    [
        ("eager", True, torch.autograd.grad),
        ("eager", False, backward_of_some),
        (None, True, backward_of_some),
        (None, False, torch.autograd.grad),
    ],
)
@on_ranks(2)
def test_gradients_of_some_parameters_of_a_unit_that_accumulates_are_refused(compile, inside, ask):
    torch._dynamo.reset()
    model, call = models.sharded(Layers, compile=compile)
    x = torch.ones(2, 3)
    with vc.no_sync(model):
        call(x, 2).backward()
    with vc.no_sync(model) if inside else contextlib.nullcontext():
        loss = call(x, 2)
    with pytest.raises(RuntimeError, match=r"rank \d.*parameter layers\.0\..*no_sync"):
        ask(loss, [model.layers[0].weight])


@pytest.mark.parametrize("inside", [True, False])
@on_ranks(2)
def test_where_the_forward_ran_counts_though_it_runs_again_in_the_backward(inside):
    """A checkpointed region around compiled layers."""
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(Layers))
    calls = [torch.compile(layer, backend="vescale", options={"lowering": "eager"}) for layer in model.layers]
    x = torch.ones(2, 3)

    def forward() -> torch.Tensor:
        out = x
        for call in calls:
            out = checkpoint(call, out, use_reentrant=False)
        return out.sum()

    with vc.no_sync(model):
        forward().backward()
        first = forward()
    second = forward()
    with vc.no_sync(model) if inside else contextlib.nullcontext():
        first.backward()
        second.backward()
    reference = models.build(Layers)
    for _ in range(3):
        reference(x, 2).backward()
    models.average_gradients(reference)
    assert gradients_differ(model, reference) < 1e-6


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_one_backward_may_run_through_forwards_inside_and_outside(compile):
    data = models.batches(2, 11)
    model, call = uneven(compile)
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
    model, call = uneven()
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
    assert all(buffer.reductions.unreduced is None for buffer in buffers_in(model))


@on_ranks(2)
def test_a_copy_of_a_model_has_none_of_what_was_accumulated():
    first, second = models.batches(2, 11)
    model, call = uneven()
    with vc.no_sync(model):
        call(*first).backward()
    copied = copy.deepcopy(model)
    copied(*second).backward()
    reference = models.build(models.Uneven)
    accumulate_unsharded(reference, [second])
    assert gradients_differ(copied, reference) == 0.0


@pytest.mark.parametrize(("given", "error"), [(torch.nn.Linear(2, 2), ValueError), (None, TypeError)], ids=type)
def test_no_sync_of_what_is_not_sharded_says_so(given, error):
    with pytest.raises(error, match="fully_shard"), vc.no_sync(given):
        pass
