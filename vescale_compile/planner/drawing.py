"""ASCII drawings of buffers: a line for each rank, a letter for each tensor, dots for padding."""

from __future__ import annotations

from bisect import bisect_right
from string import ascii_letters
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vescale_compile.planner.plan import BufferPlan

COLUMNS = 64
MOST_RANKS = 16
MOST_TENSORS = 24


def draw_buffer(plan: BufferPlan) -> str:
    """The buffer's figures, its ranks (the first and last of many) and a legend.

    A column stands for ``shard_numel / 64`` elements and shows what lies at its middle, so a tensor smaller
    than a column may show in the legend alone.
    """
    world, shard = plan.world_size, plan.shard_numel
    lines = [
        f"{plan.numel:,} elements on {world:,} ranks: S = {shard:,}, padding {plan.padding_numel:,} "
        f"({plan.padding_percent:.2f} %), bound {plan.lower_bound:,} (gap {plan.gap_percent:.2f} %)"
    ]
    head = world if world <= MOST_RANKS else MOST_RANKS - 3
    lines += [f"{rank:>7} |{_draw_rank(plan, rank)}|" for rank in range(head)]
    if head < world:
        lines += ["    ...", *(f"{rank:>7} |{_draw_rank(plan, rank)}|" for rank in (world - 2, world - 1))]
    for index, (tensor, start) in enumerate(zip(plan.tensors, plan.layout.starts, strict=True)):
        if index == MOST_TENSORS and len(plan.tensors) > MOST_TENSORS + 1:
            lines.append(f"  ... and {len(plan.tensors) - index} more tensors")
            break
        lines.append(
            f"{_letter(index):>3} {tensor.name} {list(tensor.shape)} at {start:,}, blocks of {tensor.block_numel:,}"
        )
    return "\n".join(lines)


def _draw_rank(plan: BufferPlan, rank: int) -> str:
    starts, items = plan.layout.starts, plan.layout.items
    drawn = []
    for column in range(COLUMNS):
        element = rank * plan.shard_numel + (2 * column + 1) * plan.shard_numel // (2 * COLUMNS)
        index = bisect_right(starts, element) - 1
        inside = index >= 0 and element < starts[index] + items[index].numel
        drawn.append(_letter(index) if inside else ".")
    return "".join(drawn)


def _letter(index: int) -> str:
    return ascii_letters[index % len(ascii_letters)]
