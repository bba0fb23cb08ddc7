"""How the tensors of an optimizer's state lie: made and checked by one description."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..ragged.dtensor import RaggedDTensor
from ..ragged.local import check_is_of_this_rank
from ..ragged.placement import RaggedShard
from .units import describe, rank_prefix


class Layout(NamedTuple):
    """A global shape, and on the parameter's mesh a placement, None for a tensor that is not sharded."""

    shape: tuple[int, ...]
    placement: RaggedShard | None


def layout_of(tensor: Tensor) -> Layout:
    """Of a tensor as it is."""
    return Layout(tuple(tensor.shape), tensor.placement if isinstance(tensor, RaggedDTensor) else None)


def new_state(param: Tensor, layouts: Mapping[str, Layout | None]) -> dict[str, Tensor]:
    """A parameter's state before its first step: zeros; where there is no layout, a step counter as torch.optim's."""
    return {key: new_counter() if layout is None else _zeros(param, layout) for key, layout in layouts.items()}


def new_counter() -> Tensor:
    """Of steps, 0-dim, on the CPU; in float32 whatever the default is: bfloat16 would stand still at 256."""
    return torch.tensor(0.0, dtype=torch.float32, device="cpu")


def check_state(
    optimizer: str, name: str | None, param: Tensor, state: Mapping[str, Any], layouts: Mapping[str, Layout | None]
) -> None:
    """Refuses a parameter's loaded state, if there is one, that has not tensors of these layouts and no others.

    Raises:
        ValueError: naming the rank, the parameter, what differs and what to do.
        RaggedShardError: another rank has saved it.
    """
    where = f"{rank_prefix(param)}{optimizer}: the state of {describe(param, name)} "
    if state and state.keys() != layouts.keys():
        raise ValueError(f"{where}holds {sorted(state)}, and needs {sorted(layouts)}; it is another algorithm's")
    for key, value in state.items():
        layout = layouts[key]
        if layout is not None and layout_of(value) != layout:
            raise ValueError(
                f"{where}has a {key} of {_text(layout_of(value))}, where {_text(layout)} is needed. States of another "
                "number of ranks or another granularity are loaded through torch.distributed.checkpoint, which cuts "
                "them anew; other blocks need a new state."
            )
        if isinstance(param, RaggedDTensor) and isinstance(value, RaggedDTensor):
            check_is_of_this_rank(param, value)


class _Grid(Protocol):
    """How a parameter is divided into blocks."""

    def blocks_before(self, element: int) -> int | None:
        """Blocks that begin before an element of the flattened parameter, where a shard may end."""

    def __hash__(self) -> int: ...


@functools.lru_cache(maxsize=1024)
def placement_of_blocks(placement: RaggedShard, shape: tuple[int, ...], grid: _Grid) -> RaggedShard:
    """Where a tensor of one row for each block lies: with the blocks, none of which the placement of the parameter, of
    this shape, cuts. Of thousands of ranks; layers are cut alike."""
    counts = [0] * len(placement.local_units)
    for rank, (start, stop) in placement.held(shape).items():
        counts[rank] = (grid.blocks_before(stop) or 0) - (grid.blocks_before(start) or 0)
    return RaggedShard((0,), counts)


def _zeros(param: Tensor, layout: Layout) -> Tensor:
    if not isinstance(param, RaggedDTensor) or layout.placement is None:
        return param.new_zeros(layout.shape)
    start, stop = layout.placement.interval(layout.shape, param.device_mesh.get_local_rank())
    return param.placed(param.to_local().new_zeros(stop - start), layout.placement, layout.shape)


def _text(layout: Layout) -> str:
    return f"shape {layout.shape}" + (f" placed by {layout.placement}" if layout.placement is not None else "")
