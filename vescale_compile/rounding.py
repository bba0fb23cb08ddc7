"""Where quantized gradients' streams of random numbers are: what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .runtime.rounding import Rounding
from .sharded_module import buffers_in, uncompiled


def rounding_state(module: nn.Module) -> dict[str, int]:
    """How many of each unit's gradients were quantized: with the seed, what stochastic rounding depends on.

    A checkpoint that keeps it resumes with the same bits on the same ranks. It is the same on all ranks.

    Raises:
        ValueError: no unit in the module has quantized gradients.
    """
    return {name: rounding.count for name, rounding in _roundings(module).items()}


def load_rounding_state(module: nn.Module, state: Mapping[str, int]) -> None:
    """Sets what :func:`rounding_state` returned.

    Raises:
        ValueError: no unit in the module has quantized gradients, or one is missing in the state. Nothing is set then.
    """
    roundings = _roundings(module)
    for name in roundings:
        if name not in state:
            known = ", ".join(map(repr, state))
            raise ValueError(
                f"load_rounding_state: no state for unit {name!r}; there is for {known}. Load that of a model "
                "with the same units"
            )
    for name, rounding in roundings.items():
        rounding.count = state[name]


def _roundings(module: nn.Module) -> dict[str, Rounding]:
    """By name of the unit in ``module``, which may hold several modules that were sharded each by itself."""
    paths = {part: name for name, part in uncompiled(module).named_modules()}
    found: dict[str, Rounding] = {}
    for buffer in buffers_in(module):
        if buffer.gradient_packing is not None:
            root = buffer.model.root
            path = paths.get(root, "") if root is not None else ""
            found[f"{path}.{buffer.name}" if path else buffer.name] = buffer.reductions.rounding
    if not found:
        raise ValueError(f"{type(module).__name__}: no unit of it has quantized gradients")
    return found
