"""AdamW8bit on plain tensors: its arithmetic, and what every optimizer of torch.optim does."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adamw8bit_cases import SHAPES, adamw8bit, assert_same_bits, contents, give_gradients, parameters, three_decades
from adamw8bit_reference import Moments
from torch import nn

from vescale_compile.optim.gradients import UnusableGradients

STEPS = 4


def train(make: Callable[..., torch.optim.Optimizer], steps: int = STEPS, **options: Any) -> list[torch.Tensor]:
    """Parameters and states after some steps."""
    optimizer = make(params := parameters(), **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return contents(params, optimizer)


@pytest.mark.parametrize("shape", [(64, 96), (5000,)])
def test_a_step_is_adamw_with_each_moment_rounded_to_its_nearest_code(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(shape))
    expected, moments = param.detach().flatten().clone(), Moments(param.numel(), 256)
    optimizer = adamw8bit([param], weight_decay=0.1)
    for step in range(1, 6):
        param.grad = three_decades(shape, seed=step)
        moments.step(expected, param.grad.flatten(), step, lr=0.01, weight_decay=0.1)
        optimizer.step()
    state = optimizer.state[param]
    for name, codes, scales in zip(("exp_avg", "exp_avg_sq"), moments.codes, moments.scales, strict=True):
        assert torch.equal(state[f"{name}_codes"].flatten().long(), codes)
        torch.testing.assert_close(state[f"{name}_scales"], scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(param.detach().flatten(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5)])
def test_codes_and_scales_equal_torchao(betas: tuple[float, float]) -> None:
    import torchao.optim as torchao

    ours, theirs = parameters()[:1], parameters()[:1]
    optimizer, reference = adamw8bit(ours, betas=betas), torchao.AdamW8bit(theirs, lr=0.01, betas=betas)
    for step in range(STEPS):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    state, expected = optimizer.state[ours[0]], reference.state[theirs[0]]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[f"{name}_codes"], expected[name].codes)
        assert torch.equal(state[f"{name}_scales"], expected[name].scale)


def test_without_decay_a_moment_is_the_gradient_itself() -> None:
    param = nn.Parameter(torch.zeros(4096))
    optimizer = adamw8bit([param], betas=(0.0, 0.0))
    for size in (1e6, 1e-3):
        param.grad = torch.full((4096,), size)
        optimizer.step()
    assert optimizer.state[param]["exp_avg_scales"].unique().tolist() == [param.grad[0]]


def test_small_parameters_step_as_adamw() -> None:
    for ours, theirs, shape in zip(train(adamw8bit), train(torch.optim.AdamW, lr=0.01), SHAPES, strict=False):
        if math.prod(shape) < 4096:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_where_the_second_moment_underflows_steps_stay_near_those_of_adamw() -> None:
    def after(steps: int, step: Callable[[torch.Tensor, torch.Tensor, int], None]) -> torch.Tensor:
        weights = torch.zeros(4096)
        for count in range(1, steps + 1):
            step(weights, three_decades((4096,), seed=count), count)
        return weights

    def with_optimizer(make: Callable[..., torch.optim.Optimizer]) -> torch.Tensor:
        param = nn.Parameter(torch.zeros(4096))
        optimizer = make([param], lr=0.01, weight_decay=0.0)

        def step(weights: torch.Tensor, grad: torch.Tensor, count: int) -> None:
            param.grad = grad
            optimizer.step()
            weights.copy_(param.detach())

        return after(10, step)

    unprotected = Moments(4096, 256)

    def as_published(weights: torch.Tensor, grad: torch.Tensor, count: int) -> None:
        unprotected.step(weights, grad, count, lr=0.01, weight_decay=0.0, protected=False)

    expected = with_optimizer(torch.optim.AdamW)
    assert (with_optimizer(adamw8bit) - expected).abs().max() < 5 * 0.01
    assert (after(10, as_published) - expected).abs().max() > 50 * 0.01


@pytest.mark.parametrize("size", [1e-8, 1e-10, 1e-13])
def test_where_a_block_is_below_the_least_scale_elements_move_by_at_most_the_learning_rate(size: float) -> None:
    param = nn.Parameter(torch.zeros(4096))
    optimizer = adamw8bit([param], lr=0.01, weight_decay=0.0, eps=1e-15)
    for _ in range(20):
        before = param.detach().clone()
        param.grad = torch.full((4096,), size)
        optimizer.step()
        assert (param - before).abs().max() <= 0.01 * (1 + 1e-5)


def test_states_take_at_most_2_1_bytes_for_a_parameter() -> None:
    for blocks in ({}, {"tile": (32, 32)}):
        param = nn.Parameter(torch.randn(256, 512))
        optimizer = adamw8bit([param], **blocks)
        param.grad = torch.randn(256, 512)
        optimizer.step()
        size = sum(state.untyped_storage().nbytes() for state in optimizer.state[param].values())
        assert size <= 2.1 * param.numel()


def test_tiles_share_a_scale() -> None:
    param = nn.Parameter(torch.zeros(96, 64))
    param.grad = torch.zeros(96, 64)
    param.grad[40, 33] = 7.0
    optimizer = adamw8bit([param], tile=(32, 32))
    optimizer.step()
    scales = optimizer.state[param]["exp_avg_scales"].tolist()
    assert scales == pytest.approx([1e-12, 1e-12, 1e-12, 0.7, 1e-12, 1e-12])


@pytest.mark.parametrize("blocks", [{}, {"tile": (32, 32)}])
def test_foreach_joins_parameters_without_changing_bits(blocks: dict) -> None:
    assert_same_bits(train(adamw8bit, foreach=True, **blocks), train(adamw8bit, foreach=False, **blocks))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [{}, {"tile": (16, 32)}])
def test_compiled_steps_have_the_bits_of_eager_ones(blocks: dict) -> None:
    assert_same_bits(train(adamw8bit, compile=True, **blocks), train(adamw8bit, compile=False, **blocks))


@pytest.mark.slow
def test_neither_sizes_nor_learning_rates_compile_again() -> None:
    def step(numel: int, lr: float) -> None:
        param = nn.Parameter(torch.randn(numel))
        param.grad = torch.randn(numel)
        adamw8bit([param], lr=lr, compile=True).step()

    graphs = torch._dynamo.utils.counters["stats"]
    step(4096, 0.1)
    before = graphs["unique_graphs"]
    step(8192, 0.2)
    step(12288, 0.3)
    assert graphs["unique_graphs"] == before > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_parameters_are_stepped_in_float32(dtype: torch.dtype) -> None:
    short = parameters(dtype)
    long = [nn.Parameter(param.detach().float()) for param in short]
    optimizers = [adamw8bit(params) for params in (short, long)]
    give_gradients(short, 0)
    for ours, theirs in zip(short, long, strict=True):
        theirs.grad = ours.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(ours, theirs.to(dtype)) for ours, theirs in zip(short, long, strict=True))


def test_a_parameter_without_a_gradient_is_skipped() -> None:
    optimizer = adamw8bit(params := parameters())
    before = [param.detach().clone() for param in params]
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0]) and list(optimizer.state) == params[:1]
    assert all(torch.equal(param, old) for param, old in zip(params[1:], before[1:], strict=True))


def test_groups_have_their_own_options() -> None:
    fast, slow = parameters()[:2]
    optimizer = adamw8bit([{"params": [fast], "lr": 0.1, "tile": (32, 32)}, {"params": [slow], "weight_decay": 0.5}])
    assert [(g["lr"], g["weight_decay"], g["tile"]) for g in optimizer.param_groups] == [
        (0.1, 0.01, (32, 32)),
        (0.01, 0.5, None),
    ]
    before = fast.detach().clone()
    give_gradients([fast, slow], 0)
    optimizer.step()
    assert (fast - before).abs().max() > 0.05
    assert optimizer.state[fast]["exp_avg_scales"].shape == (6,)


def test_a_schedule_changes_the_learning_rate() -> None:
    def run(lr: float | torch.Tensor) -> torch.Tensor:
        optimizer = adamw8bit(params := parameters()[:1], lr=lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(STEPS):
            give_gradients(params, step)
            optimizer.step()
            schedule.step()
        assert float(optimizer.param_groups[0]["lr"]) == 0.5**STEPS
        return params[0].detach()

    assert torch.equal(run(1.0), run(torch.tensor(1.0)))


def test_zero_grad_and_a_closure_do_as_in_torch_optim() -> None:
    optimizer = adamw8bit(params := parameters()[:1])

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (params[0] ** 2).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    assert losses[1] < losses[0]
    optimizer.zero_grad(set_to_none=False)
    assert not params[0].grad.any()
    optimizer.zero_grad()
    assert params[0].grad is None


def test_grad_scaler_divides_gradients_and_skips_infinite_ones() -> None:
    scaled, plain = parameters()[:1], parameters()[:1]
    optimizer, reference = adamw8bit(scaled), adamw8bit(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for step in range(2):
        give_gradients(scaled, step)
        give_gradients(plain, step)
        scaled[0].grad *= 1024.0 if step == 0 else math.inf
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            reference.step()
    assert torch.equal(scaled[0], plain[0]) and optimizer.state[scaled[0]]["step"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(bad: float) -> None:
    optimizer = adamw8bit(params := parameters())
    give_gradients(params, 0)
    optimizer.step()
    before = contents(params, optimizer)
    give_gradients(params, 1)
    params[3].grad[17] = bad
    with pytest.raises(UnusableGradients, match=r"gradient of a parameter of shape \(5000,\) has NaN or infinite"):
        optimizer.step()
    assert_same_bits(contents(params, optimizer), before)


def test_without_the_check_a_gradient_that_is_not_finite_is_used() -> None:
    optimizer = adamw8bit(params := parameters()[:1], check_gradients=False)
    give_gradients(params, 0)
    params[0].grad[0, 0] = math.nan
    optimizer.step()
    assert params[0].isnan().any()


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(64, 64, sparse=True)
    for check in (True, False):
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(ValueError, match=r"'weight'.*sparse"):
            adamw8bit(table.named_parameters(), check_gradients=check).step()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, r"lr is -1\.0"),
        ({"lr": torch.ones(2)}, ValueError, "lr is a tensor of shape"),
        ({"eps": math.nan}, ValueError, "eps is nan"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"betas": 0.9}, ValueError, "betas"),
        ({"block": 0}, ValueError, "block holds 0"),
        ({"tile": (32,)}, TypeError, "tile is"),
        ({"compile": 1}, TypeError, "compile is 1"),
        ({"foreach": "yes"}, TypeError, "foreach is 'yes'"),
    ],
)
def test_wrong_options_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        adamw8bit(parameters(), **options)


@pytest.mark.parametrize(
    ("param", "options", "error", "message"),
    [
        (torch.zeros(64, 64, dtype=torch.float64), {}, TypeError, "'w' of shape .64, 64. is torch.float64"),
        (torch.zeros(64, 128)[:, :64], {}, ValueError, "not contiguous"),
        (
            torch.zeros(16, 512),
            {"tile": (32, 32)},
            ValueError,
            r"'w'.*32 x 32 is larger than the tensor",
        ),
    ],
)
def test_parameters_that_can_not_be_stepped_are_refused(
    param: torch.Tensor, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        adamw8bit([("w", param)], **options)


@pytest.mark.parametrize("option", [{"betas": (2.0, 0.9)}, {"amsgrad": True}], ids=str)
def test_a_refused_group_is_not_added(option: dict) -> None:
    optimizer = adamw8bit(parameters()[:1])
    with pytest.raises(ValueError, match=next(iter(option))):
        optimizer.add_param_group({"params": parameters()[1:], **option})
    assert len(optimizer.param_groups) == 1


def test_a_parameter_of_a_refused_group_may_be_added_with_other_tiles() -> None:
    first, large, small = (nn.Parameter(torch.zeros(shape)) for shape in ((64, 64), (64, 64), (16, 512)))
    optimizer = adamw8bit([first])
    with pytest.raises(ValueError, match="32 x 32 is larger than the tensor"):
        optimizer.add_param_group({"params": [large, small], "tile": (32, 32)})
    optimizer.add_param_group({"params": [large], "tile": (8, 32)})
    give_gradients([large], 0)
    optimizer.step()
    assert optimizer.state[large]["exp_avg_scales"].numel() == 16


def test_a_copied_optimizer_steps_as_the_first() -> None:
    params = parameters()
    optimizer = adamw8bit(params)
    give_gradients(params, 0)
    optimizer.step()
    copied_params, copied = copy.deepcopy((params, optimizer))
    for each, stepped in ((params, optimizer), (copied_params, copied)):
        give_gradients(each, 1)
        stepped.step()
    assert_same_bits(contents(params, optimizer), contents(copied_params, copied))


@pytest.mark.parametrize("numel", [8192, 8])
@pytest.mark.parametrize(
    "sizes", [[1e20, 1, 1], [1e30, 1, 1], [3e38] * 30 + [-3e38] * 30], ids=["1e20", "1e30", "both signs"]
)
def test_a_gradient_whose_square_is_infinite_moves_its_element_as_any_other(numel: int, sizes: list[float]) -> None:
    param = nn.Parameter(torch.zeros(numel))
    optimizer = adamw8bit([param], lr=0.01, weight_decay=0.0)
    param.grad = torch.ones(numel)
    for size in sizes:
        before = param.detach().clone()
        param.grad[0] = size
        optimizer.step()
        assert (param - before).abs().max() <= 0.011
