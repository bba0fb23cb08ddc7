"""Quantized reductions: unbiased, reproducible, and never hiding what is not finite."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn

import vescale_compile as vc
from vescale_compile.runtime.packing import Packing
from vescale_compile.runtime.quantizing import average_into, quantize_into
from vescale_compile.runtime.rounding import Rounding
from vescale_compile.runtime.strips import Kernels

sys.path.append(str(Path(__file__).parents[1] / "compiled"))

import models

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Linear(nn.Module):
    """Gradients of ``weight`` and ``bias`` are what it is called with."""

    def __init__(self, shape: tuple[int, int] = (33, 70)) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape[1]))

    def forward(self, of_weight: Tensor, of_bias: Tensor) -> Tensor:
        return (self.weight * of_weight).sum() + (self.bias * of_bias).sum()


class Twice(nn.Module):
    """Two of them, with the same gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Linear(), Linear()

    def forward(self, of_weight: Tensor, of_bias: Tensor) -> Tensor:
        return self.first(of_weight, of_bias) + self.second(of_weight, of_bias)


def given(rank: int, shape: tuple[int, int] = (33, 70)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator), torch.randn(shape[1], generator=generator)


def sharded(seed: int | None = None, block: int = 32, **options) -> nn.Module:
    return vc.fully_shard(Linear(), quantize_gradients=vc.BlockInt8(block, seed), **options)


def reduced(module: nn.Module, *grads: Tensor) -> list[Tensor]:
    """The gradients of one backward, gathered."""
    module.zero_grad()
    module(*grads).backward()
    return [param.grad.full_tensor() for param in module.parameters()]


def average(index: int) -> Tensor:
    """The sum over ranks in their order, over how many they are."""
    first, *others = (given(rank)[index] for rank in range(dist.get_world_size()))
    for other in others:
        first = first + other
    return first / dist.get_world_size()


@on_ranks(1, 2, 3, 4)
def test_gradients_are_averaged_to_within_a_step_of_their_blocks():
    weight, bias = reduced(sharded(), *given(dist.get_rank()))
    steps = [
        grad.reshape(-1).split(32)[block].abs().max() / 127
        for grad in (given(rank)[0] for rank in range(dist.get_world_size()))
        for block in range(-(-grad.numel() // 32))
    ]
    assert (weight - average(0)).abs().max() <= max(steps)
    assert not torch.equal(weight, average(0))
    assert torch.equal(bias, average(1))  # no matrix: not quantized


@on_ranks(2)
def test_the_average_is_what_codes_and_scales_of_each_rank_stand_for():
    """Integers times a power of two are their own codes, whatever they are rounded by."""
    grad = torch.randint(-127, 128, (33, 70), generator=torch.Generator().manual_seed(dist.get_rank())).float()
    grad[:, ::6] = 127  # so that every block has the same scale
    weight, _ = reduced(sharded(), grad * 0.25, given(0)[1])
    total = grad * 0.25
    dist.all_reduce(total)
    assert torch.equal(weight, total / 2)


@on_ranks(2)
def test_what_a_function_leaves_out_is_averaged_exactly():
    def quantize(name: str, param: nn.Parameter) -> vc.BlockInt8 | None:
        return vc.BlockInt8(32) if name == "first.weight" else None

    module = vc.fully_shard(Twice(), quantize_gradients=quantize)
    first, _, second, _ = reduced(module, *given(dist.get_rank()))
    assert not torch.equal(first, average(0))
    assert torch.equal(second, average(0))


def rounded(values: Tensor, times: int, seed: int = 0) -> Tensor:
    """[times, n]: what one rank's gradient ``values``, a matrix, comes out as in reduction after reduction."""
    packing = Packing("test", vc.BlockInt8(64), 1, values.numel(), [(0, tuple(values.shape))], torch.float32)
    stream = Rounding("unit")
    packed = torch.empty(packing.nbytes, dtype=torch.uint8)
    found = torch.empty(times, values.numel())
    for each in found:
        quantize_into(packing, None, values.view(-1), packed, Kernels.EAGER, stream.next_key(seed))
        average_into(packing, 0, packed, packed, each, Kernels.EAGER)
    return found


@on_ranks(1)
def test_rounding_is_unbiased():
    """The mean of n roundings is within 5 standard errors: a rounding's variance is at most step**2 / 4."""
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    values[0] = torch.linspace(0, 1, 64)
    times = 4000
    step = values.view(-1, 64).abs().amax(1, keepdim=True) / 127
    off = (rounded(values, times).double().mean(0).view(8, 64) - values) / step
    assert off.abs().max() <= 5 * 0.5 / times**0.5
    assert abs(off.mean()) <= 5 * 0.5 / (times * values.numel()) ** 0.5  # over all elements too


@on_ranks(1)
def test_rounding_has_the_spread_that_a_uniform_number_gives():
    """fraction * (1 - fraction) steps squared, and no correlation between neighbours or between steps."""
    values = torch.full((4, 64), 0.3)
    values[:, 0] = 127.0  # scale 1
    found = rounded(values, 2000)[:, torch.arange(256) % 64 > 0]
    assert set(found.unique().tolist()) == {0.0, 1.0}
    assert found.var().item() == pytest.approx(0.21, abs=0.005)
    centred = found - found.mean()
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 0.003
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.003


@on_ranks(2)
def test_the_same_seed_gives_the_same_bits_and_another_others():
    grads = given(dist.get_rank())
    runs = [
        [reduced(module, *grads)[0] for _ in range(2)] for module in (sharded(1), sharded(1), sharded(2), sharded())
    ]
    first, again, other, default = runs
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])  # a step is not rounded like the one before
    assert not torch.equal(first[0], other[0])
    assert torch.equal(default[0], reduced(sharded(0), *grads)[0])


@on_ranks(2)
def test_a_stream_goes_on_where_a_checkpoint_left_it():
    grads = given(dist.get_rank())
    module = sharded()
    reduced(module, *grads)
    state = vc.rounding_state(module)
    assert state == {"(root)": 1}
    resumed = sharded()
    vc.load_rounding_state(resumed, state)
    assert torch.equal(reduced(module, *grads)[0], reduced(resumed, *grads)[0])


@on_ranks(2)
def test_a_stream_goes_on_where_the_furthest_part_of_its_block_was():
    module = sharded()
    vc.load_rounding_state(module, {"(root)#0": 3, "(root)#1": 5})
    assert vc.rounding_state(module) == {"(root)": 5}


@on_ranks(2)
def test_a_stream_goes_on_where_its_unit_has_come_to_several_buffers():
    """As another number of ranks may make it."""
    model = Twice()
    model.second.double()
    module = vc.fully_shard(model, quantize_gradients=vc.BlockInt8(32))
    vc.load_rounding_state(module, {"(root)": 4})
    assert vc.rounding_state(module) == {"(root)#0": 4, "(root)#1": 4}


@on_ranks(2)
def test_a_state_of_other_units_is_refused():
    with pytest.raises(ValueError, match=r"no state for unit '\(root\)'.*'layers.0'"):
        vc.load_rounding_state(sharded(), {"layers.0": 3})
    with pytest.raises(ValueError, match="no unit of it has quantized gradients"):
        vc.rounding_state(vc.fully_shard(Linear()))


@on_ranks(2)
def test_ranks_round_independently():
    """Two ranks with the same gradient: their roundings would not average out otherwise."""
    values = torch.full((33, 70), 0.5)
    values[:, 0] = 127.0
    weight, _ = reduced(sharded(block=70), values, given(0)[1])
    assert {0.0, 0.5, 1.0} == set(weight[:, 1:].unique().tolist())


@on_ranks(2)
def test_the_default_generator_is_left_alone():
    module = sharded()
    before = torch.get_rng_state()
    reduced(module, *given(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@on_ranks(2)
def test_what_is_not_finite_stays_so(value):
    """On one rank alone, and in its block alone."""
    weight, bias = given(dist.get_rank())
    if dist.get_rank() == 1:
        weight[5, 6] = value
    found, _ = reduced(sharded(), weight, bias)
    block = (5 * 70 + 6) // 32
    finite = found.view(-1).isfinite()
    assert not found[5, 6].isfinite()
    assert finite[: block * 32].all() and finite[(block + 1) * 32 :].all()


@on_ranks(2)
def test_grad_scaler_skips_a_step_with_an_infinity():
    module = sharded()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    weight, bias = given(0)
    weight[0, 0] = torch.inf if dist.get_rank() == 0 else 1.0
    scaler.scale(module(weight, bias)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 65536.0
    assert all(param.full_tensor().count_nonzero() == 0 for param in module.parameters())


@on_ranks(2)
def test_units_of_two_modules_that_were_sharded_by_themselves_are_told_apart_in_the_state():
    model = torch.nn.ModuleDict({name: sharded() for name in ("encoder", "decoder")})
    for name, times in (("encoder", 1), ("decoder", 2)):
        for _ in range(times):
            model[name](*given(0)).backward()
    state = vc.rounding_state(model)
    assert sorted(state.values()) == [1, 2]
    assert all(name.startswith(("encoder.", "decoder.")) for name in state)
    vc.load_rounding_state(model, dict.fromkeys(state, 5))
    assert vc.rounding_state(model["encoder"]).popitem()[1] == 5


@pytest.mark.parametrize("lowering", ["eager", None])
@on_ranks(2)
def test_micro_batches_are_summed_and_quantized_once(lowering):
    torch._dynamo.reset()
    options = {"quantize_gradients": vc.BlockInt8(32)}
    model, call = models.sharded(models.one_layer_llama, compile=lowering, **options)
    first, second = models.batches(2, 64)
    with vc.no_sync(model):
        call(*first).backward()
    call(*second).backward()
    assert set(vc.rounding_state(model).values()) == {1}
    reference = models.build(models.one_layer_llama)
    for batch in (first, second):
        reference(*batch).backward()
    models.average_gradients(reference)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad.full_tensor(), theirs.grad, rtol=0, atol=float(theirs.grad.abs().max()) / 50 + 1e-7
        )


@on_ranks(2)
def test_graphs_and_eager_mode_round_alike():
    data = models.batches(3, 64)
    losses = []
    for lowering in ("eager", None):
        torch._dynamo.reset()
        options = {"quantize": vc.BlockInt8(32), "quantize_gradients": vc.BlockInt8(32, seed=5)}
        model, call = models.sharded(models.one_layer_llama, compile=lowering, **options)
        losses.append(models.train(call, model.parameters(), data))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@on_ranks(2)
def test_a_reduction_in_bfloat16_is_summed_in_float32():
    policy = vc.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    weight, bias = reduced(sharded(mp_policy=policy), *given(dist.get_rank()))
    torch.testing.assert_close(weight, average(0), rtol=0, atol=0.05)
    torch.testing.assert_close(bias, average(1), rtol=0, atol=0.02)


@on_ranks(1)
def test_nineteen_ranks_average_what_each_has():
    """As the fifth of them, which receives nothing from itself."""
    world, own, matrix, numel = 19, 4, (16, 64), 1024 + 32
    packing = Packing(
        "test", vc.BlockInt8(64), world, numel, [(own * numel, matrix), (own * numel + 1024, (32,))], torch.float32
    )
    parts, expected = [], torch.zeros(numel)
    for rank in range(world):
        grads = torch.zeros(world, numel)
        grads[own] = torch.randint(-127, 128, (numel,), generator=torch.Generator().manual_seed(rank))
        grads[own, :1024:64] = 127
        packed = torch.empty(packing.nbytes, dtype=torch.uint8)
        quantize_into(packing, None, grads.view(-1), packed, Kernels.EAGER, Rounding("unit").next_key(rank))
        parts.append(packed.view(world, -1)[own])
        expected += grads[own]
    received = torch.stack(parts)
    received[own] = 255
    for dtype in (torch.float32, torch.bfloat16):
        shard = torch.empty(numel, dtype=dtype)
        average_into(packing, own, parts[own], received.view(-1), shard, Kernels.EAGER)
        assert torch.equal(shard, (expected / world).to(dtype))
