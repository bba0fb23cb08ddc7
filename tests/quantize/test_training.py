"""Training with quantized gathers: the numbers of a model of quantized weights, with straight-through gradients."""

import functools
import sys
from pathlib import Path

import formats
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.quantize import BlockQuantizer
from vescale_compile.sharded_module import buffers_in

sys.path.append(str(Path(__file__).parents[1] / "compiled"))

import models
from test_warm_start import cold_and_warm, trained

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Small(nn.Module):
    """Two units of sizes that formats divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList([nn.Linear(32, 32)])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.layers[0](self.embed(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Stacked(Small):
    """Its layer's experts are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts()])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights, self.biases = nn.Parameter(torch.randn(4, 32, 32) / 6), nn.Parameter(torch.zeros(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.unsqueeze(1) @ self.weights + self.biases.unsqueeze(1)).sum(1)


class Routed(nn.Module):
    """A block adds what its experts make of a token, as its router weighs them; the router has 3 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([RoutedBlock()])
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.router = nn.Linear(32, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights = self.router(x).softmax(-1).unbind(-1)
        return sum(w.unsqueeze(-1) * expert(x) for w, expert in zip(weights, self.experts, strict=True))


@functools.cache
def reference_run(build: models.Model, quantizer: BlockQuantizer, backend: str | None, vocab: int, steps: int):
    """The unsharded model of quantized weights and its losses, of all that this rank's process compares with it."""
    through = functools.partial(formats.expected, quantizer)
    return models.train_unsharded(build, models.batches(steps, vocab), backend, through)


def check(
    build: models.Model,
    quantizer,
    lowering: str | None,
    steps: int = 3,
    vocab: int = 64,
    reference: str | None = None,
    **options,
) -> None:
    """A step computes with what quantization leaves of the masters, which take the gradients as they are."""
    torch._dynamo.reset()
    data = models.batches(steps, vocab)
    model, call = models.sharded(build, compile=lowering, quantize=quantizer, **options)
    losses = models.train(call, model.parameters(), data)
    masters, expected = reference_run(build, quantizer, reference, vocab, steps)
    assert losses == expected
    for (key, param), master in zip(model.named_parameters(), masters.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), master), key


@pytest.mark.parametrize("quantizer", [vc.BlockInt8(32), vc.BlockFP8((8, 8)), vc.MXFP8()], ids=repr)
@on_ranks(2)
def test_steps_are_bit_equal_to_straight_through_training(quantizer):
    check(Small, quantizer, "eager")


@pytest.mark.parametrize("lowering", [None, "eager"])
@on_ranks(2)
def test_so_they_are_with_a_llama(lowering):
    reference = "aot_eager" if lowering else None  # attention has other bits uncompiled
    check(models.one_layer_llama, vc.BlockInt8(32), lowering, reference=reference)


@on_ranks(2)
def test_so_they_are_with_sizes_that_nothing_divides():
    check(models.Uneven, vc.BlockFP8((3, 5)), "eager", vocab=11)


@on_ranks(2)
def test_so_they_are_where_parameters_are_kept_for_the_backward():
    check(Small, vc.BlockInt8(32), "eager", reshard_after_forward=False)


@on_ranks(2)
def test_so_they_are_with_stacks_of_experts():
    check(Stacked, vc.BlockFP8((4, 4)), "eager")


@pytest.mark.parametrize("lowering", [None, "eager"])
@on_ranks(2)
def test_so_they_are_with_a_router_that_is_left_out_of_tiles_larger_than_it(lowering):
    torch._dynamo.reset()
    quantizer, data = vc.BlockFP8((8, 8)), models.batches(3, 64)

    def quantize(name: str, param: nn.Parameter) -> vc.BlockFP8 | None:
        return None if "router" in name else quantizer

    def through(master: Tensor) -> Tensor:
        return master if master.shape == (3, 32) else formats.expected(quantizer, master)

    model, call = models.sharded(Routed, compile=lowering, quantize=quantize)
    losses = models.train(call, model.parameters(), data)
    masters, expected = models.train_unsharded(Routed, data, through=through)
    assert losses == expected
    for (key, param), master in zip(model.named_parameters(), masters.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), master), key


@on_ranks(2)
def test_so_they_are_over_replicas():
    """Two replicas, each on one rank: nothing is sharded, everything is quantized."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    check(Small, vc.BlockInt8(32), "eager", mesh=mesh)


@on_ranks(4)
def test_replicas_of_shards_stay_equal():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch._dynamo.reset()
    options = {"mesh": mesh, "quantize": vc.BlockFP8((3, 5)), "quantize_gradients": vc.BlockInt8(7)}
    model, call = models.sharded(functools.partial(models.Uneven, 1), compile="eager", **options)
    models.train(call, model.parameters(), models.batches(3, 11))
    for buffer in buffers_in(model):
        other = buffer.shard.clone()
        torch.distributed.broadcast(other, group=buffer.replicas, group_src=0)
        for index in range(len(buffer.slots)):
            assert torch.equal(buffer.local(other, index), buffer.local(buffer.shard, index))


@on_ranks(2, deadline_s=600)
def test_inductor_lowering_is_within_rounding_after_a_cold_and_a_warm_start():
    # No matrix has two blocks in a line, or two of gradients at all: what quantizes one unit quantizes them all.
    options = {"steps": 3, "quantize": vc.BlockFP8((3, 7)), "quantize_gradients": vc.BlockInt8(49)}
    losses, _ = cold_and_warm(**options)
    uncompiled, *_ = trained(lowering=None, keeps_one=True, **options)
    assert losses == pytest.approx(uncompiled, rel=2e-3)


@on_ranks(2)
def test_a_small_llama_learns_with_everything_quantized():
    options = {"quantize": vc.BlockFP8((8, 8)), "quantize_gradients": vc.BlockInt8(32)}
    model, call = models.sharded(models.one_layer_llama, compile=None, **options)
    losses = models.train(call, model.parameters(), models.batches(1, 64) * 30, models.adamw)
    plain, call = models.sharded(models.one_layer_llama, compile=None)
    unquantized = models.train(call, plain.parameters(), models.batches(1, 64) * 30, models.adamw)
    assert unquantized[-1] < 1 < unquantized[0]
    assert losses[-1] < 1.3 * unquantized[-1] + 0.05
