"""Placement for one order and one shard size, and the layout that checks itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_references import all_layouts, is_valid, items

from vescale_compile.planner.layout import Item, Layout, aligned_start, earliest_start, place_aligned, place_in_order


@settings(max_examples=2000)
@given(items(30), st.integers(0, 60), st.integers(1, 30))
def test_earliest_start_is_the_first_valid_one(item: Item, position: int, shard: int) -> None:
    first = next((s for s in range(position, position + 3 * shard) if is_valid(s, item, shard)), None)
    assert earliest_start(position, item, shard) == first


@settings(max_examples=600)
@given(st.lists(items(7), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 3))
def test_no_layout_of_an_order_ends_before_the_earliest_starts_do(
    order: list[Item], shard: int, world_size: int
) -> None:
    layouts = list(all_layouts(order, shard, world_size * shard))
    starts = place_in_order(order, shard, world_size * shard)
    if starts is None:
        assert not layouts
    else:
        assert tuple(starts) == min(layouts, key=lambda layout: layout[-1])


@pytest.mark.slow
@settings(max_examples=2000)
@given(items(30), st.integers(0, 60), st.integers(1, 8), st.sampled_from([2, 4, 8]))
def test_an_aligned_start_is_the_first_that_is_valid_and_aligned(
    item: Item, position: int, shards: int, alignment: int
) -> None:
    shard = shards * alignment
    valid = [s for s in range(position, position + 4 * shard * alignment) if is_valid(s, item, shard)]
    first = next((s for s in valid if s % alignment == 0), next(iter(valid), None))
    assert aligned_start(position, item, shard, alignment) == first


def test_a_small_tensor_of_odd_size_does_not_shift_the_matrices_behind_it() -> None:
    odd, matrix = Item(1, 1), Item(64, 8)
    assert place_aligned([odd, matrix, matrix], 68, 136, 4, keep_order=False) == ([odd, matrix, matrix], [0, 4, 68])
    both = [odd, matrix, odd, matrix]
    assert place_aligned(both, 132, 132, 4, keep_order=False) == ([matrix, matrix, odd, odd], [0, 64, 128, 129])


def test_where_there_is_no_padding_to_use_a_kept_order_is_not_aligned() -> None:
    odd, matrix = Item(1, 1), Item(64, 1)
    assert place_aligned([odd, matrix], 65, 65, 4, keep_order=True) == ([odd, matrix], [0, 1])


def test_a_layout_may_end_in_a_shorter_block_and_cut_between_blocks() -> None:
    Layout((Item(10, 4), Item(3, 3)), (0, 10), world_size=2, shard_numel=8, alignment=4)


@pytest.mark.parametrize(
    ("items_", "starts", "shard", "complaint"),
    [
        ((Item(10, 4),), (), 8, "1 items but 0 starts"),
        ((Item(10, 4), Item(2, 1)), (0, 9), 8, "before the end of its predecessor"),
        ((Item(10, 4),), (7,), 8, "past 2 x 8"),
        ((Item(10, 4),), (1,), 8, "a block of 4 elements .* is cut"),
        ((Item(2, 1),), (0,), 6, "no positive multiple of 4"),
        ((Item(2, 1),), (-1,), 8, "before the end of its predecessor"),
    ],
)
def test_a_layout_refuses_what_is_wrong(
    items_: tuple[Item, ...], starts: tuple[int, ...], shard: int, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        Layout(items_, starts, world_size=2, shard_numel=shard, alignment=4)


def test_a_layout_finds_a_cut_at_the_second_boundary() -> None:
    # The first boundary, 8 after the start, agrees with blocks of 4; the second, 18 after it, does not.
    with pytest.raises(ValueError, match="is cut"):
        Layout((Item(20, 4),), (2,), world_size=3, shard_numel=10, alignment=1)
