"""Reentrant checkpointing, whose regions run backwards of their own inside the model's."""

from collections import Counter

import models
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Reentrant(nn.Module):
    """Each layer, and then the loss, is a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.layers = nn.ModuleList(models.Block() for _ in range(3))
        self.head = nn.Linear(13, 11)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return checkpoint(self.loss, x, labels, use_reentrant=True)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def micro_batch(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    model(*batch).backward()


def sharded(layers_compiled: bool) -> nn.Module:
    torch._dynamo.reset()
    model = models.build(Reentrant)
    for unit in (*model.layers, model.head, model):  # none is used in two of the backwards
        vc.fully_shard(unit)
    for layer in model.layers if layers_compiled else ():
        layer.compile(backend="vescale", options={"lowering": "eager"})
    return model


@pytest.mark.parametrize("layers_compiled", [True, False])
@on_ranks(2)
def test_hooks_run_once_with_what_accumulated(layers_compiled):
    data = models.batches(3, 11)
    model, reference = sharded(layers_compiled), models.build(Reentrant)
    given: Counter[str] = Counter()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: given.update([name]))
    with vc.no_sync(model):
        micro_batch(model, data[0])
        micro_batch(model, data[1])
    assert not given
    micro_batch(model, data[2])
    assert set(given.values()) == {1} and len(given) == len(list(reference.parameters()))
    for batch in data:
        micro_batch(reference, batch)
    models.average_gradients(reference)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=0, atol=1e-6)


@on_ranks(2)
def test_units_that_the_last_micro_batch_did_not_use_are_reduced_though_a_backward_before_it_raised():
    def refuse(_: torch.Tensor) -> None:
        raise ValueError("refused")

    data = models.batches(3, 11)
    model, reference = sharded(layers_compiled=False), models.build(Reentrant)
    with vc.no_sync(model):
        micro_batch(model, data[0])
    loss = model(*data[1])
    hook = model.embed.weight.register_hook(refuse)
    with pytest.raises(ValueError, match="refused"):
        model.loss(model.embed(data[1][0]), data[1][1]).backward()
    hook.remove()
    model.zero_grad()
    with vc.no_sync(model):
        micro_batch(model, data[0])
    model.head(loss.new_ones(1, 13)).sum().backward()
    micro_batch(reference, data[0])
    reference.head(loss.new_ones(1, 13)).sum().backward()
    models.average_gradients(reference)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=0, atol=1e-6)
