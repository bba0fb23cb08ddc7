"""Shampoo against the float64 reference, across numbers of ranks, and as an optimizer of PyTorch."""

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from muon_cases import give_grads, random_tensors, shard, whole
from ranks import on_ranks, run_on_ranks
from shampoo_reference import ReferenceShampoo
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor.debug import CommDebugMode

import vescale_compile as vc
from vescale_compile.optim import shampoo_step
from vescale_compile.optim.gradients import UnusableGradients
from vescale_compile.optim.shampoo import Shampoo

pytestmark = pytest.mark.slow  # left out of `make test-fast`

BLOCK = 8
# One block, several, shorter last ones in both directions, stacks of one and of several blocks.
SHAPES: list[tuple[int, ...]] = [(6, 7), (16, 24), (19, 11), (3, 5, 4), (2, 16, 9)]


def shampoo(params: Sequence[Tensor], **options: Any) -> Shampoo:
    """Shampoo on all of them, whatever the rule says; eager, because compiling takes seconds."""
    groups = [{"params": list(params), "algorithm": "shampoo"}]
    return Shampoo(groups, **{"block": BLOCK, "compile": False, "frequency": 3, **options})


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        give_grads(params, random_tensors([tuple(param.shape) for param in params], seed=100 + step))
        optimizer.step()


def plain(shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [nn.Parameter(full) for full in random_tensors(shapes, seed=0)]


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


class Model(nn.Module):
    """Parameters of the shapes above and a bias, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        for i, full in enumerate(random_tensors([*SHAPES, (13,)], seed=0)):
            self.register_parameter(f"p{i}", nn.Parameter(full))


def sharded_model(**options: Any) -> tuple[nn.Module, Shampoo]:
    model = vc.fully_shard(Model(), granularity=Shampoo.granularity_for(block=BLOCK))
    return model, Shampoo(model.named_parameters(), **{"block": BLOCK, "compile": False, "frequency": 3, **options})


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


def test_every_block_gets_roots_once_in_frequency_steps_and_no_step_many(monkeypatch: pytest.MonkeyPatch) -> None:
    params = plain([(32, 32)])  # 16 blocks, two factors each
    optimizer = shampoo(params, frequency=4)
    computed: list[int] = []

    def count(*args: Any) -> Tensor:
        computed[-1] += 1
        return root(*args)

    root = shampoo_step.inverse_root
    monkeypatch.setattr(shampoo_step, "inverse_root", count)
    for step in range(8):
        computed.append(0)
        train(optimizer, params, step, step + 1)
    assert computed == [2 * 16 // 4] * 8


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


def test_a_state_of_other_blocks_is_refused() -> None:
    params = plain([(16, 24)])
    optimizer = shampoo(params)
    train(optimizer, params, 0, 1)
    with pytest.raises(
        ValueError, match=r"Shampoo: .*has a left of shape \(6, 8, 8\), where shape \(2, 16, 16\).*blocks"
    ):
        shampoo(plain([(16, 24)]), block=16).load_state_dict(optimizer.state_dict())


@on_ranks(2)
def test_a_state_of_another_granularity_is_refused_and_nothing_loaded() -> None:
    (full,) = random_tensors([(24, 8)], seed=0)
    params = [shard(full, vc.RaggedShard((0,), rows)) for rows in ((16, 8), (8, 16))]
    saved, other = (shampoo([param], lr=lr) for param, lr in zip(params, (0.7, 0.02), strict=True))
    for optimizer, param in zip((saved, other), params, strict=True):
        train(optimizer, [param], 0, 2)
    before = [whole(value).clone() for value in other.state[params[1]].values()]
    message = rf"\[rank {dist.get_rank()}\] Shampoo: the state of .*RaggedShard.*distributed.checkpoint"
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())
    after = [whole(value) for value in other.state[params[1]].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert other.param_groups[0]["lr"] == 0.02


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


@on_ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    model, optimizer = sharded_model()
    params = list(model.parameters())
    train(optimizer, params, 0, 1)
    grads = random_tensors([tuple(param.shape) for param in params], seed=1)
    grads[1][0, 0] = value
    give_grads(params, grads)
    before = [whole(t).clone() for p in params for t in (p, *optimizer.state[p].values())]
    with pytest.raises(RuntimeError, match=r"\[rank \d\] Shampoo: the gradient of parameter 'p1'"):
        optimizer.step()
    after = [whole(t) for p in params for t in (p, *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_ranks(3)
@pytest.mark.parametrize("frequency", [1, 1000])
def test_a_factor_that_overflows_on_one_rank_changes_nothing_on_any(frequency: int) -> None:
    # With roots due in every step, and with none due for long after the first.
    model, optimizer = sharded_model(frequency=frequency)
    params = list(model.parameters())
    train(optimizer, params, 0, 1)
    grads = random_tensors([tuple(param.shape) for param in params], seed=1)
    grads[2][-1, -1] = 1e25  # finite, its square is not
    give_grads(params, grads)
    holder = max(rank for rank, (a, b) in enumerate(params[2].placement.intervals(params[2].shape)) if b > a)
    before = [whole(t).clone() for p in params for t in (p, *optimizer.state[p].values())]
    me = dist.get_rank()
    message = rf"\[rank {me}\] Shampoo: the gradient of parameter 'p2' .* factors that overflow.* on rank {holder}\."
    with pytest.raises(UnusableGradients, match=message):
        optimizer.step()
    after = [whole(t) for p in params for t in (p, *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_first_step_that_fails_leaves_no_state() -> None:
    params = plain([(6, 7)])
    optimizer = shampoo(params, frequency=1)
    give_grads(params, [torch.full((6, 7), 1e25)])
    with pytest.raises(UnusableGradients, match=r"the gradient of a parameter of shape .* factors that overflow"):
        optimizer.step()
    assert not optimizer.state
    train(optimizer, params, 0, 1)
    assert optimizer.state[params[0]]["step"] == 1


@on_ranks(2)
def test_a_shard_that_cuts_a_block_is_refused_with_rank_name_and_remedy() -> None:
    param = shard(torch.zeros(16, 4), vc.RaggedShard((0,), (9, 7)))
    message = r"\[rank \d\] Shampoo: parameter 'w' .*rank 0 of its mesh holds.*granularity_for\(block=8\)"
    with pytest.raises(ValueError, match=message):
        Shampoo([{"params": [("w", param)], "algorithm": "shampoo"}], block=8)


MATRIX = nn.Parameter(torch.zeros(4, 4))
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "ridge": ({}, {"ridge": -1.0}, "ridge is -1.0"),
    "frequency": ({}, {"frequency": 0}, "frequency is 0; it must be an int of at least 1"),
    "grafting": ({}, {"grafting": "rmsprop"}, "grafting is 'rmsprop'; give 'adam'"),
    "block": ({}, {"block": 1}, "block is 1; it must be an int of at least 2"),
    "betas": ({}, {"betas": (0.9, 1.0)}, "betas is (0.9, 1.0)"),
    "a vector": ({"params": [nn.Parameter(torch.zeros(4))]}, {}, "of shape (4,) is no matrix"),
    "bfloat16": (
        {"params": [nn.Parameter(torch.zeros(4, 4).bfloat16())]},
        {},
        "factors need float32",
    ),
    "the optimizer's option": ({"block": 16}, {}, "['block'] can't be options of a group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    group, options, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        Shampoo([{"params": [MATRIX], "algorithm": "shampoo", **group}], **options)
