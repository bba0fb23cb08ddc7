"""What Shampoo refuses: gradients, shards, states and arguments, with nothing half-updated."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from muon_cases import give_grads, random_tensors, shard, whole
from ranks import on_ranks
from shampoo_cases import plain, shampoo, sharded_model, train
from torch import nn

import vescale_compile as vc
from vescale_compile.optim.gradients import UnusableGradients
from vescale_compile.optim.shampoo import Shampoo

pytestmark = pytest.mark.slow  # left out of `make test-fast`


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
    "ridge": ({}, {"ridge": 0.0}, "ridge is 0.0"),
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
