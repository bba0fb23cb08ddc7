"""Optimizers that need whole blocks of a parameter: each states the granularity that ``fully_shard`` should keep."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adamw8bit import AdamW8bit
    from .gradients import UnusableGradients
    from .muon import Muon
    from .shampoo import Shampoo

__all__ = ["AdamW8bit", "Muon", "Shampoo", "UnusableGradients"]

# Loaded at first use: a script pays for the one optimizer that it builds.
_HOMES = {"AdamW8bit": "adamw8bit", "Muon": "muon", "Shampoo": "shampoo", "UnusableGradients": "gradients"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
