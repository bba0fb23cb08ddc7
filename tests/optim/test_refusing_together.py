"""What is wrong on one rank is refused on every rank: no rank waits for another, none steps without it."""

import copy
import math
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.optim.gradients import UnusableGradients
from vescale_compile.ragged.redistribute import distribute_ragged
from vescale_compile.runtime.agreement import RanksDisagree

pytestmark = pytest.mark.slow  # left out of `make test-fast`

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW8bit": lambda params: vc.optim.AdamW8bit(params, compile=False),
    "Muon": vc.optim.Muon,
    "Shampoo": lambda params: vc.optim.Shampoo(params, block=16, compile=False),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


class Model(nn.Module):
    """Matrices that every rank holds a part of, and one that may be left whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 96) for _ in range(2))
        self.whole = nn.Linear(64, 64)


def build(name: str, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    """A model after one step."""
    torch.manual_seed(0)
    model = Model()
    if options.pop("leave_whole", False):
        options["ignored_params"] = list(model.whole.parameters())
    vc.fully_shard(model, granularity=lambda name, param: vc.Rows(16), **options)
    optimizer = OPTIMIZERS[name](model.named_parameters())
    give_gradients(model.parameters())
    optimizer.step()
    return model, optimizer


def give_gradients(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        param.grad = torch.full_like(param.detach(), 0.1)


@on_ranks(2)
@each_optimizer
def test_one_rank_alone_may_load_the_state_that_it_has(name: str) -> None:
    model, optimizer = build(name)
    if dist.get_rank() == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert all(torch.isfinite(local(param)).all() for param in model.parameters())


@on_ranks(2)
@each_optimizer
def test_a_loaded_state_is_over_the_process_groups_of_its_parameter(name: str) -> None:
    """A file names those of the run that wrote it, which may be other ranks' in this one."""
    _, optimizer = build(name)
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    states = [(param, each) for param, state in optimizer.state.items() for each in state.values()]
    over = [each.device_mesh is param.device_mesh for param, each in states if isinstance(each, vc.RaggedDTensor)]
    assert over and all(over)


@on_ranks(4)
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_parameters_with_replicas_and_such_without(name: str) -> None:
    """Though both are sharded over the same ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "same"))
    model, rows = Model(), vc.optim.Shampoo.granularity_for(block=16)
    vc.fully_shard(model.whole, mesh=mesh["same"], granularity=rows)
    vc.fully_shard(model, mesh=mesh, granularity=rows, ignored_params=model.whole.parameters())
    with pytest.raises(ValueError, match=rf"\[rank {dist.get_rank()}\] {name}: .*build an optimizer for each mesh"):
        OPTIMIZERS[name](model.named_parameters())


@on_ranks(2)
@pytest.mark.parametrize(("name", "option"), [("Muon", "ns_steps"), ("Shampoo", "frequency")])
def test_an_option_that_one_rank_alone_has_loaded(name: str, option: str) -> None:
    model, optimizer = build(name)
    if dist.get_rank() == 1:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0][option] = 7
        optimizer.load_state_dict(saved)
    message = rf"\[rank {dist.get_rank()}\] {name}: .*rank 1 has 'group 0: {name.lower()}, {option} 7' where rank 0 has"
    assert_nothing_changes(model, optimizer, RanksDisagree, message)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, vc.RaggedDTensor) else tensor


def assert_nothing_changes(
    model: nn.Module, optimizer: torch.optim.Optimizer, error: type[Exception], message: str
) -> None:
    held = [local(t) for p in model.parameters() for t in (p.detach(), *optimizer.state[p].values())]
    before = [each.clone() for each in held]
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, held, strict=True))


@on_ranks(2)
@each_optimizer
def test_a_gradient_of_another_layout_on_one_rank(name: str) -> None:
    model, optimizer = build(name)
    param = model.layers[0].weight
    if here := dist.get_rank() == 1:
        elsewhere = vc.RaggedShard((0, 1), [0, param.numel()])
        param.grad = distribute_ragged(torch.zeros(param.shape), param.device_mesh, elsewhere)
    if here:
        assert_nothing_changes(model, optimizer, ValueError, r"\[rank 1\].*'layers.0.weight'.*not sharded as")
    else:
        message = r"\[rank 0\].*'layers.0.weight'.*not laid out as the parameter is, on rank 1"
        assert_nothing_changes(model, optimizer, UnusableGradients, message)


@on_ranks(2)
@each_optimizer
def test_a_gradient_of_an_unsharded_parameter(name: str) -> None:
    model, optimizer = build(name, leave_whole=True)
    give_gradients(model.parameters())
    if dist.get_rank() == 1:
        model.whole.weight.grad[0, 0] = math.nan
    message = rf"\[rank {dist.get_rank()}\].*'whole.weight'.*NaN.*on rank 1"
    assert_nothing_changes(model, optimizer, UnusableGradients, message)


@on_ranks(4)
@each_optimizer
@pytest.mark.parametrize("missing", [False, True], ids=["NaN", "missing"])
def test_a_gradient_of_one_replica(name: str, missing: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = build(name, mesh=mesh)
    give_gradients(model.parameters())
    rank = dist.get_rank()
    param = model.layers[1].weight
    if missing and rank >= 2:
        param.grad = None
    elif rank >= 2:
        local(param.grad).fill_(math.nan)
    what = r"has a gradient on rank 1 and none on rank 3" if missing else "NaN.* on rank 3"
    message = rf"\[rank {rank}\].*'layers.1.weight'.*{what}"
    assert_nothing_changes(model, optimizer, UnusableGradients, message)
