"""RaggedShard counts each rank's share in units of whole blocks."""

import copy
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_compile.ragged.placement import RaggedShard


def test_intervals_follow_the_units_in_rank_order() -> None:
    placement = RaggedShard((0,), (3, 0, 1))
    assert placement.unit_numel((8, 5)) == 10
    assert placement.intervals((8, 5)) == ((0, 30), (30, 30), (30, 40))


def test_a_unit_may_be_part_of_a_row_if_both_dimensions_may_be_cut() -> None:
    assert RaggedShard((0, 1), (1, 5)).intervals((2, 3)) == ((0, 1), (1, 6))


def test_no_dims_keeps_the_tensor_whole_on_one_rank() -> None:
    assert RaggedShard((), (0, 1, 0)).intervals((8, 5)) == ((0, 0), (0, 40), (40, 40))
    assert RaggedShard((), (0, 1)).intervals(()) == ((0, 0), (0, 1))


@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((1,), (1, 1), r"prefix .* got \(1,\)"),
        ((0, 2), (1, 1), "prefix"),
        ((0,), (), "not all zero"),
        ((0,), (0, 0), "not all zero"),
        ((0,), (2, -1), "non-negative"),
    ],
)
def test_impossible_placements_are_refused(dims: tuple, units: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RaggedShard(dims, units)


@pytest.mark.parametrize(
    ("placement", "shape", "message"),
    [
        (RaggedShard((0,), (2, 2)), (3, 5), "4 units, which do not divide the 15 elements"),
        (RaggedShard((0,), (2, 2)), (2, 10), "units of 5 elements .* multiple of 10"),
        (RaggedShard((), (1, 1)), (4,), "units of 2 elements .* multiple of 4"),
        (RaggedShard((0, 1), (1, 1)), (4,), "cuts 2 dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(placement: RaggedShard, shape: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placement.intervals(shape)


def test_equal_placements_are_one_key_and_survive_copies() -> None:
    placement = RaggedShard([0], [3, 1])
    assert placement == RaggedShard((0,), (3, 1)) != RaggedShard((0,), (1, 3))
    assert placement != RaggedShard((), (1, 0))
    assert len({placement, RaggedShard((0,), (3, 1))}) == 1
    for copied in (copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert copied == placement and hash(copied) == hash(placement)
    assert eval(repr(placement)) == placement


def test_a_placement_does_not_change() -> None:
    with pytest.raises(AttributeError):
        RaggedShard((0,), (1, 1)).dims = ()  # type: ignore[misc]


def test_it_is_no_other_kind_of_placement() -> None:
    placement = RaggedShard((0,), (1, 1))
    assert not (placement.is_shard() or placement.is_replicate() or placement.is_partial())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.integers(1, 4))
def test_intervals_partition_the_tensor(units: list[int], unit_rows: int) -> None:
    shape = (sum(units) * unit_rows, 3)
    intervals = RaggedShard((0,), units).intervals(shape)
    assert [stop - start for start, stop in intervals] == [n * unit_rows * 3 for n in units]
    assert intervals[0][0] == 0 and intervals[-1][1] == shape[0] * 3
    assert all(a[1] == b[0] for a, b in itertools.pairwise(intervals))


def test_a_placement_of_thousands_of_ranks_is_written_in_runs() -> None:
    assert repr(RaggedShard((0,), (2, 0, 1))) == "RaggedShard(dims=(0,), local_units=(2, 0, 1))"
    many = RaggedShard((0,), (0,) * 5000 + (7,) * 3 + (0,) * 4997)
    assert repr(many) == "RaggedShard(dims=(0,), local_units=(5000 * 0, 3 * 7, 4997 * 0))"
    assert repr(RaggedShard((0,), (1, 2) * 5000)).endswith("1 * 1, 1 * 2, 9984 more ranks))")


def test_one_ranks_interval_is_that_among_all() -> None:
    placement, shape = RaggedShard((0,), (2, 0, 1, 3)), (12, 5)
    assert [placement.interval(shape, rank) for rank in range(4)] == list(placement.intervals(shape))


def test_what_ranks_hold_are_the_intervals_that_are_not_empty() -> None:
    assert RaggedShard((0,), (0, 2, 0, 1, 3)).held((12, 5)) == {1: (0, 20), 3: (20, 30), 4: (30, 60)}
    assert RaggedShard((0,), (1, 2)).held((0, 5)) == {}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.data())
def test_the_counts_of_a_run_are_what_of_it_lies_in_each_interval(units: list[int], data: st.DataObject) -> None:
    placement, shape = RaggedShard((0,), units), (sum(units), 3)
    first = data.draw(st.integers(0, sum(units) * 3 - 1))
    last = data.draw(st.integers(first + 1, sum(units) * 3))
    held = [len(range(max(start, first), min(stop, last))) for start, stop in placement.intervals(shape)]
    assert placement.counts(shape, first, last) == held


def test_views_of_a_placement_in_as_many_dimensions_are_one() -> None:
    """Each would be checked and hashed, which takes a look at each of maybe thousands of ranks."""
    placement = RaggedShard((0,), (1, 0, 3))
    assert placement.viewed((4, 3), (12,)) is placement
    assert placement.viewed((4, 3), (3, 4)) is placement.viewed((4, 3), (6, 2))
