"""The 8-bit optimizer's states: flat buffers for each unit, views of them for each parameter, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..ragged.dtensor import RaggedDTensor
from ..ragged.placement import RaggedShard
from ..runtime.boundary import binding_of
from .blocks import BlockGrid, Blocks
from .layouts import new_counter, placement_of_blocks
from .units import describe, local_elements, rank_prefix

CODED = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales")
DENSE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Member:
    """A parameter of the optimizer.

    Attributes:
        param: sharded, or plain.
        name: as the user gave it; None if not.
        blocks: its group's.
        grid: its blocks; None if its states are float32.
    """

    param: Tensor
    name: str | None
    blocks: Blocks
    grid: BlockGrid | None

    @staticmethod
    def of(param: Tensor, name: str | None, blocks: Blocks) -> Member:
        """Raises ValueError and TypeError for parameters that can't be stepped."""
        where = f"{rank_prefix(param)}AdamW8bit: {describe(param, name)} "
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{where}is {param.dtype}; steps are computed in float32. Give it to torch.optim.AdamW")
        if not isinstance(param, RaggedDTensor):
            if isinstance(param, DTensor):
                raise TypeError(
                    f"{where}is a DTensor placed by {param.placements}; shard with vescale_compile.fully_shard, which "
                    "keeps blocks whole"
                )
            if not param.is_contiguous():
                raise ValueError(f"{where}is not contiguous (strides {param.stride()}), so it has no runs of blocks")
        try:
            grid = blocks.grid(param.shape)
        except ValueError as error:
            raise ValueError(f"{where}can't be quantized: {error}") from None
        if grid is not None and isinstance(param, RaggedDTensor):
            _check_cuts(param, grid, where)
        return Member(param, name, blocks, grid)

    @property
    def states(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Global shape and dtype of each state, ``step`` apart."""
        shape, grid = tuple(self.param.shape), self.grid
        if grid is None:
            return dict.fromkeys(DENSE, (shape, torch.float32))
        codes, scales = (shape, torch.uint8), ((grid.count,), torch.float32)
        return dict(zip(CODED, (codes, codes, scales, scales), strict=True))

    def __str__(self) -> str:
        return f"{rank_prefix(self.param)}AdamW8bit: {describe(self.param, self.name)} "


def _check_cuts(param: RaggedDTensor, grid: BlockGrid, where: str) -> None:
    for rank, (start, stop) in param.placement.held(param.shape).items():
        if grid.cuts(stop):
            size = f"{grid.w} elements" if grid.h == 1 else f"{grid.h} x {grid.w}"
            raise ValueError(
                f"{where}is cut inside a block of {size}: rank {rank} of {param.device_mesh.size()} holds elements "
                f"[{start}, {stop}). Shard it with fully_shard(granularity=AdamW8bit.granularity), or, for other "
                "blocks, AdamW8bit.granularity_for(block=..., tile=...), with those of the optimizer"
            )


def in_memory_order(members: Sequence[Member]) -> list[list[Member]]:
    """Members by unit, in the order in which a unit's buffer holds them; each plain parameter by itself."""
    units: dict[int, list[Member]] = {}
    for member in members:
        binding = binding_of(member.param)
        units.setdefault(id(member.param if binding is None else binding.buffer), []).append(member)
    return [sorted(unit, key=lambda m: getattr(binding_of(m.param), "slot", 0)) for unit in units.values()]


def new_states(unit: Sequence[Member]) -> list[dict[str, Tensor]]:
    """Zero states for each parameter of a unit: ``step``, and views of buffers that the whole unit shares."""
    states: list[dict[str, Tensor]] = [{"step": new_counter()} for _ in unit]
    for names, coded in ((CODED, True), (DENSE, False)):
        chosen = [pair for pair in zip(unit, states, strict=True) if (pair[0].grid is not None) == coded]
        for name in names if chosen else ():
            lengths = [_local_length(member, name) for member, _ in chosen]
            dtype = chosen[0][0].states[name][1]
            flat = torch.zeros(sum(lengths), dtype=dtype, device=unit[0].param.device)
            for (member, state), view in zip(chosen, flat.split(lengths), strict=True):
                state[name] = _wrap(member, name, view)
    return states


def _local_length(member: Member, name: str) -> int:
    numel, grid = local_elements(member.param).numel(), member.grid
    return grid.blocks_before(numel) if grid is not None and name.endswith("scales") else numel


def _wrap(member: Member, name: str, flat: Tensor) -> Tensor:
    """A parameter's part of a flat state as a tensor of the parameter's shape, or [blocks], sharded alike."""
    shape, _ = member.states[name]
    placement = _placement(member, name)
    if placement is None:
        return flat.view(shape)
    assert isinstance(member.param, RaggedDTensor)
    return member.param.placed(flat, placement, shape)


def _placement(member: Member, name: str) -> RaggedShard | None:
    """Where a state of a sharded parameter lies: with the elements, or the blocks, of the parameter."""
    param, grid = member.param, member.grid
    if not isinstance(param, RaggedDTensor):
        return None
    if grid is None or not name.endswith("scales"):
        return param.placement
    return placement_of_blocks(param.placement, tuple(param.shape), grid)


def loaded_states(unit: Sequence[Member], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    """New states with the values of saved ones, which :func:`check_saved` found to fit."""
    states = new_states(unit)
    for state, values in zip(states, saved, strict=True):
        for name, tensor in state.items():
            tensor.copy_(torch.as_tensor(values[name]))
    return states


def check_blocks(member: Member, blocks: Blocks | None) -> None:
    """ValueError unless a saved group has the blocks of a member of this one; ``blocks`` is None if it has none."""
    if blocks != member.blocks:
        theirs = "of another optimizer" if blocks is None else f"divided by {blocks}"
        raise ValueError(
            f"{member}can't take the saved state: it is {theirs}, this optimizer's is divided by {member.blocks}. "
            "Build the optimizer, and shard the model, with the block and tile of the saved state, or start without it"
        )


def check_saved(member: Member, saved: Mapping[str, Any]) -> None:
    """Refuses states that were not saved by this optimizer for such a parameter.

    Args:
        member: the parameter that the states are for.
        saved: names and values. Sharded values must lie as the parameter does; whole ones are sliced.

    Raises:
        ValueError: naming the rank, the parameter, what differs and what to do.
    """
    where = f"{member}can't take the saved state: "
    if set(saved) != {"step", *member.states}:
        raise ValueError(f"{where}it holds {sorted(saved)}, not {sorted({'step', *member.states})}")
    for name, (shape, dtype) in member.states.items():
        tensor = saved[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{where}{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of shape {shape}"
            )
        if isinstance(tensor, DTensor) and tensor.placements != (_placement(member, name),):
            raise ValueError(
                f"{where}{name} is placed by {tensor.placements}, not as the parameter. Load it with "
                "torch.distributed.checkpoint, which reshards it, or call full_tensor() on it"
            )
