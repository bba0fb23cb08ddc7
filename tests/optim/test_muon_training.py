"""Muon as an optimizer of PyTorch: states, checkpoints, schedulers, scaling, clipping, compiled models."""

import copy
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from muon_cases import give_grads, muon, random_tensors, shard, uneven, whole
from ranks import on_ranks, run_on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import vescale_compile as vc
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.optim.muon import Muon
from vescale_compile.ragged.placement import RaggedShardError

pytestmark = pytest.mark.slow  # left out of `make test-fast`

SHAPES: list[tuple[int, ...]] = [(12, 20), (4, 6, 8), (9, 5), (16,)]
NAMES = ["layers.0.up", "layers.0.experts", "layers.0.down", "layers.0.norm"]


def named(seed: int = 0) -> list[tuple[str, Tensor]]:
    fulls = random_tensors(SHAPES, seed=seed)
    return [(name, shard(full, uneven(tuple(full.shape), 3))) for name, full in zip(NAMES, fulls, strict=True)]


def steps(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        give_grads(params, random_tensors(SHAPES, seed=100 + step))
        optimizer.step()


def values(params: Sequence[Tensor]) -> list[Tensor]:
    return [whole(param).clone() for param in params]


@on_ranks(2)
@pytest.mark.parametrize("through", ["memory", "torch.save"])
def test_a_loaded_state_continues_bit_for_bit(through: str) -> None:
    first = named()
    optimizer = Muon(first, lr=0.02)
    steps(optimizer, [p for _, p in first], 0, 2)
    second = [(name, copy.deepcopy(param)) for name, param in first]
    state = copy.deepcopy(optimizer.state_dict())  # as in torch.optim, loading does not copy
    if through == "torch.save":
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        state = torch.load(file, weights_only=False)
    resumed = Muon(second, lr=0.5)
    resumed.load_state_dict(state)
    for each, members in ((optimizer, first), (resumed, second)):
        steps(each, [p for _, p in members], 2, 4)
    for (_, a), (_, b) in zip(first, second, strict=True):
        assert torch.equal(whole(a), whole(b))


class Model(nn.Module):
    """Parameters of the shapes above, that a checkpoint knows by name."""

    def __init__(self) -> None:
        super().__init__()
        for i, full in enumerate(random_tensors([(11, 8), (8, 8), (4, 8, 8), (8,)], seed=0)):
            self.register_parameter(("embed", "up", "experts", "norm")[i], nn.Parameter(full))


def sharded_model() -> tuple[nn.Module, Muon]:
    model = vc.fully_shard(Model(), granularity=Muon.granularity)
    return model, Muon(model.named_parameters(), lr=0.02)


def model_steps(model: nn.Module, optimizer: Muon, first: int, last: int) -> None:
    params = list(model.parameters())
    for step in range(first, last):
        give_grads(params, random_tensors([tuple(p.shape) for p in params], seed=step))
        optimizer.step()


def save(path: str) -> list[Tensor]:
    model, optimizer = sharded_model()
    model_steps(model, optimizer, 0, 2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    model_steps(model, optimizer, 2, 4)
    return values(list(model.parameters()))


def load(path: str) -> list[Tensor]:
    model, optimizer = sharded_model()
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    model_steps(model, optimizer, 2, 4)
    return values(list(model.parameters()))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_two_ranks_continues_on_others_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    expected = run_on_ranks(2, save, str(tmp_path))[0]
    for loaded in run_on_ranks(ranks, load, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


@on_ranks(2)
def test_a_state_of_another_layout_is_refused_and_nothing_loaded() -> None:
    first, other = ([shard(random_tensors([(6, 4)], 0)[0], vc.RaggedShard((0,), units))] for units in ((3, 3), (5, 1)))
    optimizers = []
    for params in (first, other):
        optimizers.append(muon(params, lr=0.02))
        give_grads(params, random_tensors([(6, 4)], seed=1))
        optimizers[-1].step()
    before = whole(optimizers[1].state[other[0]]["momentum_buffer"]).clone()
    state = optimizers[0].state_dict()
    state["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"\[rank \d\] Muon: the state of .*momentum_buffer.*distributed.checkpoint"):
        optimizers[1].load_state_dict(state)
    assert torch.equal(whole(optimizers[1].state[other[0]]["momentum_buffer"]), before)
    assert optimizers[1].param_groups[0]["lr"] == 0.02


@on_ranks(2)
def test_a_state_that_another_rank_has_saved_is_refused(tmp_path: Path) -> None:
    params, rank = [shard(random_tensors([(6, 4)], 0)[0], vc.RaggedShard((0,), (3, 3)))], dist.get_rank()
    optimizer = muon(params, lr=0.02)
    give_grads(params, random_tensors([(6, 4)], seed=1))
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / f"{rank}.pt")
    dist.barrier()
    own, others = (torch.load(tmp_path / f"{each}.pt", weights_only=False) for each in (rank, 1 - rank))
    optimizer.load_state_dict(own)
    with pytest.raises(RaggedShardError, match=rf"\[rank {rank}\] .*another rank.*torch\.save"):
        optimizer.load_state_dict(others)


def test_states_of_another_algorithm_are_refused() -> None:
    def of(algorithm: str) -> Muon:
        groups = [{"params": [nn.Parameter(torch.ones(3, 3))], "algorithm": kind} for kind in ("muon", algorithm)]
        return Muon(groups)

    with pytest.raises(ValueError, match="group 1 of the state has the algorithm 'adamw', the optimizer's has 'muon'"):
        of("muon").load_state_dict(of("adamw").state_dict())


def test_a_copied_or_pickled_optimizer_goes_on() -> None:
    params = [nn.Parameter(full) for full in random_tensors([(6, 4), (4, 6)], seed=0)]
    optimizer = muon(params, exchange_bytes=4096)
    give_grads(params, random_tensors([(6, 4), (4, 6)], seed=1))
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for original, other in zip(params, copied.param_groups[0]["params"], strict=True):
            momentum = optimizer.state[original]["momentum_buffer"]
            assert torch.equal(copied.state[other]["momentum_buffer"], momentum)
            other.grad = torch.ones_like(other)
        copied.step()


@on_ranks(2)
def test_learning_rate_schedulers() -> None:
    cut, full = named(), [(name, nn.Parameter(t)) for name, t in zip(NAMES, random_tensors(SHAPES, 0), strict=True)]
    for members in (cut, full):
        optimizer = Muon(members, lr=0.1)
        params = [param for _, param in members]
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)  # moves momentum too
        for step in range(4):
            steps(optimizer, params, step, step + 1)
            (cosine if step < 2 else cycle).step()
    assert all(torch.equal(whole(a), b) for (_, a), (_, b) in zip(cut, full, strict=True))


@on_ranks(2)
def test_zero_grad_both_ways() -> None:
    params = [param for _, param in named()]
    optimizer = Muon(list(zip(NAMES, params, strict=True)))
    steps(optimizer, params, 0, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in params)
    optimizer.step()
    optimizer.zero_grad()
    before = values(params)
    optimizer.step()
    assert all(param.grad is None for param in params)
    assert all(torch.equal(a, b) for a, b in zip(before, values(params), strict=True))


@on_ranks(3)
def test_clipped_gradients() -> None:
    cut = named()
    params = [param for _, param in cut]
    give_grads(params, random_tensors(SHAPES, seed=1))
    nn.utils.clip_grad_norm_(params, 0.5)
    clipped = [whole(param.grad) for param in params]
    full = [(name, nn.Parameter(t)) for name, t in zip(NAMES, random_tensors(SHAPES, 0), strict=True)]
    give_grads([param for _, param in full], clipped)
    for members in (cut, full):
        Muon(members).step()
    assert all(torch.equal(whole(a), b) for (_, a), (_, b) in zip(cut, full, strict=True))


@on_ranks(2)
def test_grad_scaler_skips_a_step_with_an_infinite_gradient_and_unscales_others() -> None:
    params = [param for _, param in named()]
    plain = [nn.Parameter(t) for t in random_tensors(SHAPES, seed=0)]
    optimizer, reference = Muon(list(zip(NAMES, params, strict=True))), Muon(list(zip(NAMES, plain, strict=True)))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step, infinite in enumerate((False, True, False)):
        grads = random_tensors(SHAPES, seed=step)
        if not infinite:
            give_grads(plain, grads)
            reference.step()
        scaled = [grad * scaler.get_scale() for grad in grads]
        if infinite:
            scaled[0][-1, -1] = float("inf")
        give_grads(params, scaled)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(whole(a), b) for a, b in zip(params, plain, strict=True))


def test_a_closure_gives_the_loss() -> None:
    param = nn.Parameter(torch.randn(4, 4))
    optimizer = muon([param])

    def closure() -> Any:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure).item() < first.item()


@on_ranks(2)
def test_a_compiled_sharded_model_learns_as_the_unsharded_one() -> None:
    torch.manual_seed(0)
    plain = Llama(LlamaConfig(vocab_size=32, dim=16, layers=1, heads=2, kv_heads=1))
    sharded = vc.fully_shard(copy.deepcopy(plain), granularity=Muon.granularity)
    backends: dict[nn.Module, dict[str, Any]] = {
        plain: {"backend": "aot_eager"},
        sharded: {"backend": "vescale", "options": {"lowering": "eager"}},
    }
    tokens = torch.arange(24).view(2, 12) % 7  # the same on both ranks: their average is exact
    losses: dict[nn.Module, list[float]] = {plain: [], sharded: []}
    for model, backend in backends.items():
        optimizer = Muon(model.named_parameters(), lr=0.03, adjust_lr_fn="match_rms_adamw")
        compiled = torch.compile(model, **backend)
        for _ in range(8):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[model].append(loss.item())
    assert losses[sharded] == losses[plain]
    assert losses[plain][-1] < 0.5 * losses[plain][0]
