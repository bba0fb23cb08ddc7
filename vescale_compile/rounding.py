"""Where quantized gradients' streams of random numbers are: what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .runtime.rounding import Rounding
from .sharded_module import buffers_in, uncompiled


def rounding_state(module: nn.Module) -> dict[str, int]:
    """How many of each unit's gradients were quantized: with the seed, what stochastic rounding depends on.

    A checkpoint that keeps it resumes with the same bits on the same ranks. It is the same on all ranks.

    Args:
        module: sharded with ``quantize_gradients``, or ``torch.compile``'s of one.

    Returns:
        By units' names, how many times each has quantized a gradient. The seed is not in it.

    Raises:
        ValueError: no unit in the module has quantized gradients.
    """
    return {name: rounding.count for name, _, rounding in _roundings(module)}


def load_rounding_state(module: nn.Module, state: Mapping[str, int]) -> None:
    """Sets what :func:`rounding_state` returned. Where a block of layers is cut into other units than it was, as it may
    be on another number of ranks, each goes on from the most that one of them had counted.

    Args:
        module: sharded with ``quantize_gradients``, or ``torch.compile``'s of one.
        state: what :func:`rounding_state` gave for a model with the same blocks.

    Raises:
        ValueError: no unit in the module has quantized gradients, or one is missing in the state. Nothing is set then.
    """
    of_blocks: dict[str, int] = {}
    for name, count in state.items():
        for block in (name, _block_of(name)):
            of_blocks[block] = max(count, of_blocks.get(block, 0))
    found: list[tuple[Rounding, int]] = []
    for name, block, rounding in _roundings(module):
        if name not in state and block not in of_blocks:
            known = ", ".join(map(repr, state))
            raise ValueError(
                f"load_rounding_state: no state for unit {name!r}; there is for {known}. Load that of a model "
                "with the same units"
            )
        found.append((rounding, state[name] if name in state else of_blocks[block]))
    for rounding, count in found:
        rounding.count = count


def _roundings(module: nn.Module) -> list[tuple[str, str, Rounding]]:
    """With the names, in ``module``, of their units, and of the blocks that those are parts of, or are. The module may
    hold several that were sharded each by itself."""
    paths = {part: name for name, part in uncompiled(module).named_modules()}
    found = []
    for buffer in buffers_in(module):
        if buffer.gradient_packing is not None:
            root = buffer.model.root
            path = paths.get(root, "") if root is not None else ""
            name = f"{path}.{buffer.name}" if path else buffer.name
            found.append((name, _block_of(name), buffer.reductions.rounding))
    if not found:
        raise ValueError(f"{type(module).__name__}: no unit of it has quantized gradients")
    return found


def _block_of(unit: str) -> str:
    """The name of what a unit is one of several buffers of; its own if it is the only one."""
    return unit.rpartition("#")[0] or unit
