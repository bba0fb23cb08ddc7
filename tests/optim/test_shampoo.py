"""Shampoo against the float64 reference, across numbers of ranks, and as an optimizer of PyTorch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from muon_cases import give_grads, random_tensors, shard, whole
from ranks import on_ranks, run_on_ranks
from shampoo_cases import BLOCK, SHAPES, Model, plain, shampoo, sharded_model, train
from shampoo_reference import ReferenceShampoo
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor.debug import CommDebugMode

import vescale_compile as vc
from vescale_compile.optim.shampoo import Shampoo

pytestmark = pytest.mark.slow  # left out of `make test-fast`

OPTIONS: dict[str, dict[str, Any]] = {
    "every step": {"frequency": 1},
    "every third": {"frequency": 3},
    "sgd": {"frequency": 2, "grafting": "sgd"},
    "no grafting": {"frequency": 1, "grafting": None, "ridge": 1e-3},
    "averages": {"frequency": 2, "betas": (0.5, 0.7), "eps": 1e-4, "weight_decay": 0.3, "lr": 0.01},
}


def assert_near_reference(dtype: torch.dtype, tolerance: float, options: dict[str, Any]) -> None:
    params = [nn.Parameter(full.to(dtype)) for full in random_tensors(SHAPES, seed=0)]
    reference = ReferenceShampoo([param.detach() for param in params], BLOCK, **options)
    optimizer = shampoo(params, **options)
    for step in range(6):
        grads = [grad.to(dtype) for grad in random_tensors(SHAPES, seed=step + 1)]
        give_grads(params, grads)
        optimizer.step()
        reference.step(list(grads))
    for param, expected in zip(params, reference.weights, strict=True):
        torch.testing.assert_close(param.detach().double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_equal_the_float64_references(name: str) -> None:
    assert_near_reference(torch.float32, 1e-5, OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_in_float64_only_rounding_is_left(name: str) -> None:
    assert_near_reference(torch.float64, 1e-10, OPTIONS[name])


@on_ranks(1, 2, 3, 4)
def test_weights_are_equal_bit_for_bit_on_any_number_of_ranks() -> None:
    model, optimizer = sharded_model()
    unsharded = Model()
    reference = Shampoo(unsharded.named_parameters(), block=BLOCK, compile=False, frequency=3)
    for each, members in ((optimizer, model), (reference, unsharded)):
        train(each, list(members.parameters()), 0, 5)
    for param, expected in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert torch.equal(whole(param), expected)


@on_ranks(2, deadline_s=300)
def test_compiled_steps_are_equal_however_the_blocks_lie_and_near_the_eager_ones() -> None:
    shapes = [(16, 8)]
    compiled, eager = plain(shapes), plain(shapes)
    cut = [shard(param.detach(), vc.RaggedShard((0,), (8, 8))) for param in compiled]
    for params, compile_ in ((compiled, True), (cut, True), (eager, False)):
        train(shampoo(params, compile=compile_, frequency=1), params, 0, 3)
    assert torch.equal(compiled[0], whole(cut[0]))
    torch.testing.assert_close(compiled[0], eager[0], rtol=0, atol=1e-6)


@on_ranks(3)
def test_a_step_communicates_one_small_all_reduce() -> None:
    model, optimizer = sharded_model()
    train(optimizer, list(model.parameters()), 0, 1)
    with CommDebugMode() as comms:
        optimizer.step()
    counts = {str(op): count for op, count in comms.get_comm_counts().items()}
    assert counts == {"c10d.allreduce_": 1}


def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    params = plain([(6, 7), (16, 24)])
    reference = ReferenceShampoo([param.detach() for param in params], BLOCK, frequency=3)
    optimizer = shampoo(params)
    for step in range(5):
        grads: list[Tensor | None] = list(random_tensors([(6, 7), (16, 24)], seed=step))
        grads[0] = None if step in (0, 3) else grads[0]
        give_grads(params, grads)
        optimizer.step()
        reference.step(grads)
    for param, expected in zip(params, reference.weights, strict=True):
        torch.testing.assert_close(param.detach().double(), expected, rtol=0, atol=1e-5)


def test_a_block_whose_gradient_was_zero_learns_afterwards() -> None:
    params = plain([(6, 7)])
    optimizer = shampoo(params, frequency=10)
    give_grads(params, [torch.zeros(6, 7)])
    optimizer.step()
    before = params[0].detach().clone()
    train(optimizer, params, 1, 2)
    assert (params[0] - before).abs().max() > 1e-5


def test_a_block_has_no_roots_before_a_gradient_that_is_not_zero() -> None:
    shapes = [(6, 7)]
    (early,), (late,) = plain(shapes), plain(shapes)
    for param, first in ((early, torch.full((6, 7), 1e-4)), (late, torch.zeros(6, 7))):
        optimizer = shampoo([param], lr=0.0, frequency=10)
        give_grads([param], [first])
        optimizer.step()  # in which its roots are due, for ten steps
        optimizer.param_groups[0].update(lr=1e-3, weight_decay=0.0)
        give_grads([param], random_tensors(shapes, seed=1))
        optimizer.step()
    of_adamw = torch.optim.AdamW(plain(shapes), lr=0.0, weight_decay=0.0)
    (elementwise,) = of_adamw.param_groups[0]["params"]
    give_grads([elementwise], [torch.zeros(6, 7)])
    of_adamw.step()
    of_adamw.param_groups[0]["lr"] = 1e-3
    give_grads([elementwise], random_tensors(shapes, seed=1))
    of_adamw.step()
    torch.testing.assert_close(late, elementwise, rtol=0, atol=1e-6)
    assert not torch.allclose(early, elementwise, rtol=0, atol=1e-4)


@pytest.mark.parametrize("grafting", ["adam", "sgd"])
@pytest.mark.parametrize("size", [1e-23, 1e-24, 1e-30])
def test_a_step_by_gradients_whose_squares_underflow_has_the_norm_that_it_is_grafted(
    size: float, grafting: str
) -> None:
    params = [nn.Parameter(torch.zeros(6, 7))]
    first, gradient = random_tensors([(6, 7)] * 2, seed=1)
    gradient *= size
    optimizer = shampoo(params, lr=0.0, betas=(0.0, 0.5), frequency=1, grafting=grafting)
    give_grads(params, [first])
    optimizer.step()  # of gradients whose squares are there, so that there are roots
    optimizer.param_groups[0]["lr"] = 1.0
    give_grads(params, [gradient])
    optimizer.step()
    of_squares = (0.25 * first.double().square() / 0.75).sqrt() + 1e-8
    grafted = gradient.double() / (of_squares if grafting == "adam" else 1)
    torch.testing.assert_close(params[0].detach().double().norm() / grafted.norm(), torch.tensor(1.0).double())


@pytest.mark.parametrize("frequencies", [(10, 3), (3, 10)])
def test_a_block_steps_by_the_roots_that_it_has_when_the_frequency_changes(frequencies: tuple[int, int]) -> None:
    params = plain([(16, 24)])  # six blocks: after four steps some have no roots yet with 10, and all have with 3
    reference = ReferenceShampoo([param.detach() for param in params], BLOCK)
    optimizer = shampoo(params)
    for step in range(8):
        optimizer.param_groups[0]["frequency"] = reference.options["frequency"] = frequencies[step // 4]
        reference.take_turns()
        grads = random_tensors([(16, 24)], seed=step)
        give_grads(params, grads)
        optimizer.step()
        reference.step(list(grads))
    torch.testing.assert_close(params[0].detach().double(), reference.weights[0], rtol=0, atol=1e-5)


def test_an_optimizer_whose_state_was_cleared_begins_anew() -> None:
    params = plain([(16, 24)])
    begun = params[0].detach().clone()
    optimizer = shampoo(params)
    train(optimizer, params, 0, 4)
    first = params[0].detach().clone()
    optimizer.state.clear()
    params[0].data.copy_(begun)
    train(optimizer, params, 0, 4)
    assert torch.equal(params[0], first)


def test_roots_that_are_written_in_place_are_taken() -> None:
    """As torch.distributed.checkpoint does, which loads into the tensors that are there."""
    params, others = plain([(16, 24)]), plain([(16, 24)])
    optimizer, resumed = shampoo(params, frequency=10), shampoo(others, frequency=10)
    train(optimizer, params, 0, 8)
    train(resumed, others, 0, 1)
    others[0].data.copy_(params[0])
    for key, value in resumed.state[others[0]].items():
        value.copy_(optimizer.state[params[0]][key])
    for each, members in ((optimizer, params), (resumed, others)):
        train(each, members, 8, 9)
    assert torch.equal(params[0], others[0])


@on_ranks(2)
def test_a_loaded_state_continues_bit_for_bit() -> None:
    model, optimizer = sharded_model()
    train(optimizer, list(model.parameters()), 0, 4)
    copied = copy.deepcopy(model)
    resumed = Shampoo(copied.named_parameters(), lr=0.7, block=BLOCK, compile=False)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, members in ((optimizer, model), (resumed, copied)):
        train(each, list(members.parameters()), 4, 8)
    for param, expected in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(param), whole(expected))


def save(path: str) -> list[Tensor]:
    model, optimizer = sharded_model()
    train(optimizer, list(model.parameters()), 0, 4)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    train(optimizer, list(model.parameters()), 4, 8)
    return [whole(param) for param in model.parameters()]


def load(path: str) -> list[Tensor]:
    model, optimizer = sharded_model()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(optimizer, list(model.parameters()), 4, 8)
    return [whole(param) for param in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_continues_on_others_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    expected = run_on_ranks(2, save, str(tmp_path))[0]
    for loaded in run_on_ranks(ranks, load, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


@on_ranks(2)
def test_clipping_grad_scaler_and_zero_grad_do_as_on_one_rank() -> None:
    model, optimizer = sharded_model()
    unsharded = Model()
    reference = Shampoo(unsharded.named_parameters(), block=BLOCK, compile=False, frequency=3)
    params, plain_params = list(model.parameters()), list(unsharded.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step, infinite in enumerate((False, True, False)):
        grads = random_tensors([tuple(param.shape) for param in params], seed=step)
        scaled = [grad * scaler.get_scale() for grad in grads]
        if infinite:
            scaled[1][-1, -1] = float("inf")
        give_grads(params, scaled)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        if not infinite:
            give_grads(plain_params, [whole(param.grad) for param in params])
            norm = torch.cat([param.grad.flatten() for param in plain_params]).norm()
            torch.testing.assert_close(norm, torch.tensor(1.0))
            reference.step()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(whole(a), b) for a, b in zip(params, plain_params, strict=True))
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not whole(param.grad).any() for param in params)
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


def test_schedulers_and_tensor_learning_rates() -> None:
    rates = (0.1, torch.tensor(0.1))
    weights = []
    for lr in rates:
        params = plain()
        optimizer = shampoo(params, lr=lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        for step in range(3):
            train(optimizer, params, step, step + 1)
            schedule.step()
        weights.append(params)
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
