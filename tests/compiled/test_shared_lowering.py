"""Ranks of one host lower a graph once, and find it in Inductor's cache after that."""

import random

import filelock
import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch._dynamo.utils import counters

import vescale_compile as vc
from vescale_compile.shared_lowering import _lock_file, lowered_once


@pytest.fixture
def graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(torch.nn.Linear(2, 2))


class Unheard(models.Uneven):
    """A model that no cache holds: a number of this run is part of its graph."""

    def __init__(self) -> None:
        super().__init__()
        number = torch.tensor([random.SystemRandom().random()], dtype=torch.float64)
        dist.broadcast(number, 0)
        self.number = number.item()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return super().forward(tokens, labels) * self.number


@on_ranks(2)
def test_two_ranks_lower_each_graph_once():
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(Unheard))
    counters.clear()
    torch.compile(model, backend="vescale")(*models.batches(1, 11)[0]).backward()
    counted = torch.tensor([counters["inductor"][f"fxgraph_cache_{what}"] for what in ("miss", "hit")])
    dist.all_reduce(counted)
    assert counted.tolist() == [2, 2]  # a forward and a backward


def test_a_lock_that_nobody_lets_go_of_is_waited_for_until_the_deadline(graph):
    with filelock.FileLock(_lock_file(graph, [])), lowered_once(graph, [], deadline=0.1):
        pass


def test_graphs_of_other_devices_are_not_waited_for(graph):
    here, there = (_lock_file(graph, [torch.empty(2, device=device)]) for device in ("cpu", "meta"))
    assert here != there
