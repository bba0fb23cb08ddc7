"""Ways of calling a compiled model: other shapes, no gradients, several models, several forwards."""

import copy
import functools
import subprocess
import sys
import textwrap

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

import vescale_compile as vc
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`


def one_layer() -> nn.Module:
    """What Dynamo compiles for one, with batches of the usual shape, it runs for others, until a test has it forget."""
    return models.Uneven(1)


STEPS = 5


@functools.cache
def unsharded_run(seed: int = 0):
    """`one_layer` unsharded, after five batches, and its losses, which several tests compare with."""
    return models.train_unsharded(functools.partial(models.build, one_layer, seed), models.batches(STEPS, 11))


@functools.cache
def unsharded_run_of_shapes(*shapes: tuple[int, int]):
    """So, after a batch of each shape."""
    data = [models.batches(1, 11, shape=shape)[0] for shape in shapes]
    return models.train_unsharded(one_layer, data)


@pytest.mark.parametrize("dynamic", [None, True])
@on_ranks(2)
def test_batches_of_other_shapes_train_exactly(dynamic):
    torch._dynamo.reset()
    shapes = [(2, 5), (3, 7), (2, 5)]
    data = [models.batches(1, 11, shape=shape)[0] for shape in shapes]
    model = vc.fully_shard(models.build(one_layer))
    call = torch.compile(model, backend="vescale", options={"lowering": "eager"}, dynamic=dynamic)
    losses = models.train(call, model.parameters(), data)
    reference, expected = unsharded_run_of_shapes(*shapes)
    for ours, theirs in zip(losses, expected, strict=True):
        assert abs(ours - theirs) < 1e-6
    assert models.largest_difference(model, reference) < 1e-6


@on_ranks(2)
def test_one_rank_may_compile_again_for_a_batch_of_another_shape():
    torch._dynamo.reset()
    model, call = models.sharded(one_layer)
    reference = models.build(one_layer)
    for shape in [(2, 5), (2, 5), (2, 5) if dist.get_rank() == 0 else (3, 6), (2, 5)]:
        batch = models.batches(1, 11, shape=shape)[0]
        call(*batch).backward()
        reference(*batch).backward()
    models.average_gradients(reference)
    models.assert_gradients_of(model, reference, atol=1e-6)


@on_ranks(2)
def test_a_step_between_forward_and_backward_is_an_error_as_without_sharding():
    for compile in ("eager", None):
        model, call = models.sharded(one_layer, compile=compile)
        batch = models.batches(1, 11)[0]
        call(*batch).backward()
        loss = call(*batch)
        models.adamw(model.parameters()).step()
        if compile is None:  # the parameters that were gathered for the forward are still there
            loss.backward()
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@on_ranks(2)
def test_a_second_derivative_through_parameters_is_refused():
    model, call = models.sharded(models.Uneven, compile=None)
    loss = call(*models.batches(1, 11)[0])
    grads = torch.autograd.grad(loss, list(model.layers.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch._foreach_norm(grads)[0].backward()


@on_ranks(2)
def test_evaluation_between_steps_sees_the_current_parameters():
    model, call = models.sharded(one_layer)
    optimizer = models.sgd(model.parameters())
    data = models.batches(STEPS, 11)
    _, expected = unsharded_run()
    modes = [torch.no_grad, torch.inference_mode] * 2
    for batch, following, theirs, mode in zip(data[:-1], data[1:], expected[1:], modes, strict=True):
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with mode():
            assert call(*following).item() == theirs  # of which the next step is made, with these parameters


@on_ranks(2)
def test_two_forwards_then_one_backward():
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven)
    reference = models.build(models.Uneven)
    one, two = models.batches(2, 11)
    for each in (call, reference):
        (each(*one) + each(*two)).backward()
    models.average_gradients(reference)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad.full_tensor() - theirs.grad).abs().max() < 1e-7


@on_ranks(2)
def test_a_second_model_of_the_same_class_uses_its_own_parameters():
    data = models.batches(STEPS, 11)
    for seed in (0, 1):
        model = vc.fully_shard(models.build(one_layer, seed))
        call = torch.compile(model, backend="vescale", options={"lowering": "eager"})
        losses = models.train(call, model.parameters(), data)
        assert losses == unsharded_run(seed)[1]


@on_ranks(1)
def test_dynamo_compiles_as_many_sharded_classes_as_others():
    """Its recompile limit is that of a code object."""
    torch._dynamo.reset()
    limit = 2
    counters["stats"].clear()
    with torch._dynamo.config.patch(recompile_limit=limit):
        for number in range(limit + 1):
            sharded = type(f"Numbered{number}", (nn.Linear,), {"forward": numbered(number)})(3, 2)
            call = torch.compile(vc.fully_shard(sharded), backend="vescale", options={"lowering": "eager"})
            call(torch.ones(1, 3))
    assert counters["stats"]["unique_graphs"] == limit + 1


def numbered(number):
    """A forward of its own."""

    def forward(self, x):
        return nn.Linear.forward(self, x) + number

    return forward


@pytest.mark.parametrize("order", ["shard, compile", "compile, shard", "compile, run, shard"])
@on_ranks(2)
def test_one_compiled_block_serves_every_layer(order):
    """Regional compilation: each block is compiled by itself, the root is not."""
    torch._dynamo.reset()
    model, data = models.build(models.Uneven), models.batches(3, 11)
    for step in order.split(", "):
        if step == "shard":
            vc.fully_shard(model)
        elif step == "run":
            model(*data[0])
        else:
            for layer in model.layers:
                layer.compile(backend="vescale", options={"lowering": "eager"})
    losses = models.train(model, model.parameters(), data)
    assert all(buffer.deadline for layer in model.layers for buffer in buffers_in(layer))  # by compiled graphs
    _, expected = models.train_unsharded(models.Uneven, data)
    assert losses == pytest.approx(expected, abs=1e-6)


@on_ranks(2)
def test_parameters_grouped_into_units_otherwise_than_at_capture_give_the_same_numbers():
    """A function captured with two parameters of one unit is called with parameters of two units, and back."""
    torch._dynamo.reset()

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(models.Block(), models.Block()) for _ in range(2))

    model, whole = vc.fully_shard(models.build(Pairs)), models.build(Pairs)

    @torch.compile(backend="vescale", options={"lowering": "eager"})
    def apply(first, second, x):
        return second.down(first.up(x)).sum()

    x = torch.ones(2, 13)
    for first, second in ((0, 0), (0, 1), (1, 1)):
        ours = apply(model.layers[first][0], model.layers[second][1], x)
        theirs = whole.layers[second][1].down(whole.layers[first][0].up(x)).sum()
        assert torch.equal(ours, theirs)
        ours.backward()
        theirs.backward()
    for ours, theirs in zip(model.layers.parameters(), whole.layers.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert torch.equal(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
def test_a_whole_step_in_one_function_has_its_update_outside_of_what_is_compiled():
    torch._dynamo.reset()
    data = models.batches(STEPS, 11)
    model, _ = models.sharded(one_layer, compile=None)
    optimizer = models.sgd(model.parameters())

    def step(tokens, labels, update):
        loss = model(tokens, labels)
        loss.backward()
        update()
        optimizer.zero_grad()
        return loss

    compiled = torch.compile(step, backend="vescale", options={"lowering": "eager"})
    reference, expected = unsharded_run()
    losses = [compiled(*batch, torch.compiler.disable(optimizer.step)).item() for batch in data]
    assert losses == expected
    assert models.largest_difference(model, reference) == 0.0
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"rank \d\] compiled code computes on .*torch\.compiler\.disable\(optimizer"):
        compiled(*data[0], optimizer.step)


@on_ranks(2)
def test_clipping_between_backward_and_step_is_that_of_the_whole_gradient():
    model, call = models.sharded(one_layer)
    reference = models.build(one_layer)
    for each in (call, reference):
        each(*models.batches(1, 11)[0]).backward()
    models.average_gradients(reference)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, rtol=1e-5)


@on_ranks(2)
def test_unfreezing_a_parameter_takes_effect():
    model, call = models.sharded(one_layer)
    weight = model.get_parameter("head.weight")
    weight.requires_grad_(False)
    call(*models.batches(1, 11)[0]).backward()
    assert weight.grad is None
    weight.requires_grad_(True)
    call(*models.batches(1, 11)[0]).backward()
    assert weight.grad is not None


class Judged(nn.Module):
    """Trains its body against a judge that is frozen there, and the judge beside it, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.judge = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x, frozen_before):
        self.judge.requires_grad_(not frozen_before)
        made = self.body(x)
        self.judge.requires_grad_(False)
        of_body = self.judge(made).sum()
        self.judge.requires_grad_(True)
        return of_body + self.judge(made.detach()).square().sum()


@pytest.mark.parametrize("frozen_before", [False, True])
@pytest.mark.parametrize("compile", [None, "eager"])
@on_ranks(2)
def test_a_parameter_gets_no_gradient_where_it_is_frozen_and_one_where_it_is_not(compile, frozen_before):
    torch._dynamo.reset()
    model, call = models.sharded(Judged, compile=compile)
    reference, x = models.build(Judged), torch.ones(4, 3)
    for each in (call, reference):
        each(x, frozen_before).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad)


class Explored(nn.Module):
    """Looks at what it would give, and has gradients of what it gives then, in whatever mode it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        seen = self.head(self.body(x)).sum()
        with torch.enable_grad():
            return self.head(self.body(x)).sum() * seen.detach()


@pytest.mark.parametrize("compile", [None, "eager", "inductor"])
@on_ranks(2)
def test_a_forward_called_without_gradients_may_turn_them_on(compile):
    torch._dynamo.reset()
    model, call = models.sharded(Explored, compile=compile)
    reference, x = models.build(Explored), torch.ones(4, 3)
    for each in (call, reference):
        with torch.no_grad():
            loss = each(x)
        loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad)


def test_a_call_compares_no_meshes():
    compared = []

    def equal(mesh: DeviceMesh, other: object) -> bool:
        compared.append(other)
        return mesh is other

    torch._dynamo.reset()
    with fake_world(1000):
        model, call = models.sharded(one_layer)
        batch = models.batches(1, 11)[0]
        call(*batch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceMesh, "__eq__", equal)
            call(*batch)
            assert not compared
            spec = next(model.parameters())._spec
            assert spec == copy.copy(spec)
    assert compared


def test_a_model_that_is_not_sharded_compiles_with_one_warning():
    program = """
        import torch
        for width in (2, 3):
            model = torch.nn.Linear(width, 2)
            call = torch.compile(model, backend="vescale", options={"lowering": "eager"})
            assert torch.equal(call(torch.ones(1, width)), model(torch.ones(1, width)))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert result.stderr.count("Call vescale_compile.fully_shard(model)") == 1, result.stderr


def test_a_stance_in_which_compilation_comes_later_is_refused_by_name():
    torch._dynamo.reset()
    with fake_world(2):
        model = vc.fully_shard(nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)))
        tokens = torch.arange(8)
        with torch.compiler.set_stance("eager_then_compile"):
            model(tokens)  # which nothing compiles
            with pytest.raises(RuntimeError, match=r"^\[rank 0\] .*'eager_then_compile'.*: compile it without"):
                torch.compile(model, backend="vescale", options={"lowering": "eager"})(tokens)
