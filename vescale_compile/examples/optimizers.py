"""The optimizers that the example trains with, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import vescale_compile as vc

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


@dataclass(frozen=True)
class Recipe:
    """How the example uses an optimizer.

    Attributes:
        lr: default peak learning rate.
        build: makes it of a model and a learning rate.
        granularity: gives the blocks that it needs whole; called late, to import no optimizer in vain.
    """

    lr: float
    build: Callable[[nn.Module, float], torch.optim.Optimizer]
    granularity: Callable[[], Any] = lambda: None


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def _adamw8bit(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return vc.optim.AdamW8bit(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


def _muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return vc.optim.Muon(
        model.named_parameters(),
        lr=lr,
        weight_decay=WEIGHT_DECAY,
        adjust_lr_fn="match_rms_adamw",
        adamw_betas=BETAS,
    )


def _shampoo(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return vc.optim.Shampoo(model.named_parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, adamw_betas=BETAS)


RECIPES = {
    "adamw": Recipe(3e-3, _adamw),
    "sgd": Recipe(0.3, _sgd),
    "adamw8bit": Recipe(3e-3, _adamw8bit, lambda: vc.optim.AdamW8bit.granularity),
    "muon": Recipe(3e-3, _muon, lambda: vc.optim.Muon.granularity),
    "shampoo": Recipe(3e-3, _shampoo, lambda: vc.optim.Shampoo.granularity),
}
