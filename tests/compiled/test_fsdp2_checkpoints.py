"""Distributed checkpoints of FSDP2 load here, and ours there, with optimizer states."""

from pathlib import Path

import models
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`

SHARD = {"fsdp2": fully_shard, "ours": vc.fully_shard}
Training = tuple[nn.Module, nn.Module, torch.optim.Optimizer]


def training(kind: str, seed: int) -> Training:
    """A model, what is called, and the optimizer."""
    model = models.build(models.Uneven, seed)
    SHARD[kind](model)
    optimizer = models.adamw(model.parameters())
    compiled = torch.compile(model, backend="vescale", options={"lowering": "eager"}) if kind == "ours" else model
    return model, compiled, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in models.batches(2, 11):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters, and the states of each."""
    states = [optimizer.state[param] for param in model.parameters()]
    return [whole(each).detach() for each in (*model.parameters(), *(s[k] for s in states for k in sorted(s)))]


@pytest.mark.parametrize(("saving", "loading"), [("fsdp2", "ours"), ("ours", "fsdp2")])
@on_ranks(2)
def test_training_goes_on_from_the_others_checkpoint(saving: str, loading: str, tmp_path: Path):
    torch._dynamo.reset()
    model, call, optimizer = training(saving, seed=0)
    train(call, optimizer)
    weights, states = get_state_dict(call, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path)

    other, other_call, other_optimizer = training(loading, seed=1)
    weights, states = get_state_dict(other_call, other_optimizer)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=tmp_path)
    set_state_dict(other_call, other_optimizer, model_state_dict=weights, optim_state_dict=states)

    assert all(map(torch.equal, values(other, other_optimizer), values(model, optimizer)))
    train(call, optimizer)
    train(other_call, other_optimizer)
    for mine, theirs in zip(values(other, other_optimizer), values(model, optimizer), strict=True):
        torch.testing.assert_close(mine, theirs)
