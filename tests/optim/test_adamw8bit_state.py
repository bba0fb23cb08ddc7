"""AdamW8bit's state_dict: exact resumption, distributed checkpoints on other ranks, and states that do not fit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from adamw8bit_cases import (
    adamw8bit,
    assert_same_as_unsharded,
    assert_same_bits,
    contents,
    give_gradients,
    model,
    parameters,
    sharded,
    train,
)
from ranks import on_ranks, run_on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import vescale_compile as vc


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [{}, {"tile": (16, 16)}], ids=str)
def test_training_resumes_exactly(tmp_path: Path, dtype: torch.dtype, blocks: dict) -> None:
    params = parameters(dtype)
    optimizer = adamw8bit(params, **blocks)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "saved")

    saved = torch.load(tmp_path / "saved", weights_only=True)
    resumed = saved["params"]
    other = adamw8bit(resumed, **blocks, lr=5.0)
    other.load_state_dict(saved["optimizer"])
    for each, stepped in ((params, optimizer), (resumed, other)):
        give_gradients(each, 2)
        stepped.step()
    assert_same_bits(contents(params, optimizer), contents(resumed, other))


def test_a_loaded_state_is_a_copy() -> None:
    params = parameters()
    optimizer, other = adamw8bit(params), adamw8bit(parameters())
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(before := optimizer.state_dict())
    other.load_state_dict(before)
    give_gradients(other.param_groups[0]["params"], 1)
    other.step()
    for key, state in saved["state"].items():
        assert all(torch.equal(value, before["state"][key][name]) for name, value in state.items())


def test_options_of_how_to_run_stay_and_those_of_what_to_compute_are_loaded() -> None:
    saved = adamw8bit(parameters(), lr=0.5, foreach=True).state_dict()
    optimizer = adamw8bit(parameters(), foreach=False)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["foreach"] is False


def test_load_hooks_see_the_states() -> None:
    params = parameters()
    optimizer, other = adamw8bit(params), adamw8bit(parameters())
    give_gradients(params, 0)
    optimizer.step()

    def forget_the_first(_: Any, state_dict: dict) -> dict:
        return {**state_dict, "state": {key: value for key, value in state_dict["state"].items() if key != 0}}

    seen = []
    other.register_load_state_dict_pre_hook(forget_the_first)
    other.register_load_state_dict_post_hook(lambda loaded: seen.append(len(loaded.state)))
    other.load_state_dict(optimizer.state_dict())
    assert seen == [len(params) - 1] and other.param_groups[0]["params"][0] not in other.state


def refuse(change: Any, match: str, **options: Any) -> None:
    """A changed state is refused, and nothing is loaded."""
    params = parameters()[:1]
    optimizer = adamw8bit(params)
    give_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    other = adamw8bit(parameters()[:1], **options)
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(saved)
    assert not other.state and other.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("options", [{"block": 128}, {"tile": (16, 16)}])
def test_a_state_of_other_blocks_is_refused(options: dict) -> None:
    message = r"a parameter of shape \(64, 96\).*saved state.*block=256.*this optimizer"
    refuse(lambda saved: saved["param_groups"][0].update(lr=0.3), message, **options)


def test_a_state_of_another_optimizer_is_refused() -> None:
    refuse(lambda saved: saved["param_groups"][0].pop("block"), "another optimizer")
    refuse(lambda saved: saved["state"][0].pop("exp_avg_codes"), "it holds.*not.*exp_avg_codes")


def test_a_state_of_another_shape_or_dtype_is_refused() -> None:
    refuse(
        lambda saved: saved["state"][0].update(exp_avg_scales=torch.zeros(5)), r"exp_avg_scales is .*\(5,\), not.*24"
    )
    refuse(lambda saved: saved["state"][0].update(exp_avg_codes=torch.zeros(64, 96)), "exp_avg_codes is torch.float32")


def save(path: str, blocks: dict) -> None:
    module = sharded(blocks)
    optimizer = adamw8bit(module.parameters(), **blocks)
    train(module, optimizer, range(2))
    dcp.save(
        {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=path
    )


def resume(path: str, blocks: dict) -> None:
    module, reference = sharded(blocks), model()
    optimizer, expected = adamw8bit(module.parameters(), **blocks), adamw8bit(reference.parameters(), **blocks)
    train(reference, expected, range(3))

    for param in module.parameters():
        param.detach().zero_()
    state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    train(module, optimizer, range(2, 3))
    assert_same_as_unsharded(module, optimizer, reference, expected)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("blocks", [{}, {"tile": (16, 32)}], ids=str)
def test_a_checkpoint_of_two_ranks_resumes_exactly_on_others(tmp_path: Path, ranks: int, blocks: dict) -> None:
    run_on_ranks(2, save, str(tmp_path), blocks)
    run_on_ranks(ranks, resume, str(tmp_path), blocks)


@pytest.mark.slow
@on_ranks(2)
def test_states_are_sharded_as_the_parameter_is() -> None:
    module = sharded({})
    optimizer = adamw8bit(module.parameters())
    train(module, optimizer, range(1))
    param = module[0].ragged
    state = optimizer.state[param]
    assert state["exp_avg_codes"].dtype == torch.uint8
    assert state["exp_avg_codes"].shape == param.shape and state["exp_avg_codes"].placements == param.placements
    assert state["exp_avg_scales"].shape == (40,)
    held = param.to_local().numel()
    assert state["exp_avg_scales"].to_local().numel() == -(-held // 256)


@pytest.mark.slow
@on_ranks(2)
def test_whole_states_are_sliced_and_states_of_other_shards_refused() -> None:
    module, reference = sharded({}), model()
    optimizer, expected = adamw8bit(module.parameters()), adamw8bit(reference.parameters())
    train(reference, expected, range(1))
    optimizer.load_state_dict(expected.state_dict())
    module.load_state_dict(reference.state_dict())
    for each, stepped in ((module, optimizer), (reference, expected)):
        train(each, stepped, range(2, 3))
    assert_same_as_unsharded(module, optimizer, reference, expected)

    elsewhere = vc.fully_shard(model(), granularity=lambda name, param: vc.Whole())
    other = adamw8bit(elsewhere.parameters())
    train(elsewhere, other, range(1))
    other.param_groups[0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"\[rank \d\].*'0\.\w+'.*not as the parameter.*distributed.checkpoint"):
        optimizer.load_state_dict(other.state_dict())
    assert_same_as_unsharded(module, optimizer, reference, expected)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_a_state_of_another_optimizer_is_refused_though_it_holds_none_yet() -> None:
    params = parameters()
    optimizer = adamw8bit(params)
    with pytest.raises(ValueError, match=r"the saved state: it is of another optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(params).state_dict())
    assert optimizer.param_groups[0]["block"] == 256


def test_a_state_of_other_blocks_is_refused_though_it_holds_none_yet() -> None:
    optimizer = vc.optim.AdamW8bit([nn.Parameter(torch.ones(1024))], block=256)
    before_any_step = vc.optim.AdamW8bit([nn.Parameter(torch.ones(1024))], block=128).state_dict()
    with pytest.raises(ValueError, match=r"128.*this optimizer's is divided by"):
        optimizer.load_state_dict(before_any_step)
    assert optimizer.param_groups[0]["block"] == 256
