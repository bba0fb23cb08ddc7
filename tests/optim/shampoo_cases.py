"""Parameters, models and training that the tests of Shampoo share."""

from collections.abc import Sequence
from typing import Any

import torch
from muon_cases import give_grads, random_tensors
from torch import Tensor, nn

import vescale_compile as vc
from vescale_compile.optim.shampoo import Shampoo

BLOCK = 8
# One block, several, shorter last ones in both directions, stacks of one and of several blocks.
SHAPES: list[tuple[int, ...]] = [(6, 7), (16, 24), (19, 11), (3, 5, 4), (2, 16, 9)]


def shampoo(params: Sequence[Tensor], **options: Any) -> Shampoo:
    """Shampoo on all of them, whatever the rule says; eager, because compiling takes seconds."""
    groups = [{"params": list(params), "algorithm": "shampoo"}]
    return Shampoo(groups, **{"block": BLOCK, "compile": False, "frequency": 3, **options})


def train(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], first: int, last: int) -> None:
    for step in range(first, last):
        give_grads(params, random_tensors([tuple(param.shape) for param in params], seed=100 + step))
        optimizer.step()


def plain(shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    return [nn.Parameter(full) for full in random_tensors(shapes, seed=0)]


class Model(nn.Module):
    """Parameters of the shapes above and a bias, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        for i, full in enumerate(random_tensors([*SHAPES, (13,)], seed=0)):
            self.register_parameter(f"p{i}", nn.Parameter(full))


def sharded_model(**options: Any) -> tuple[nn.Module, Shampoo]:
    model = vc.fully_shard(Model(), granularity=Shampoo.granularity_for(block=BLOCK))
    return model, Shampoo(model.named_parameters(), **{"block": BLOCK, "compile": False, "frequency": 3, **options})
