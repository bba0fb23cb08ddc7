"""The search for one buffer against exhaustive search, the bound, and the published algorithm."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_references import items, published_shard, smallest_shard

from vescale_compile.planner.bound import freedom_threshold, shard_lower_bound, split_lower_bound
from vescale_compile.planner.layout import Item, earliest_start, place_in_order
from vescale_compile.planner.order import exact_order, greedy_order
from vescale_compile.planner.search import search

pytestmark = pytest.mark.slow  # left out of `make test-fast`

small = st.lists(items(16), min_size=1, max_size=5)
worlds = st.integers(1, 6)
alignments = st.sampled_from([1, 2, 4])


def random_instance(seed: int, most_items: int, most_numel: int) -> list[Item]:
    """Items whose blocks are tiny, middling or whole, so that all kinds of conflict occur."""
    rng = random.Random(seed)
    numels = [rng.randint(1, rng.choice([6, most_numel])) for _ in range(rng.randint(1, most_items))]
    return [Item(n, rng.randint(1, min(n, rng.choice([1, 4, 12, most_numel])))) for n in numels]


@pytest.mark.parametrize("seeds", [range(start, start + 500) for start in range(0, 3000, 500)])
def test_small_buffers_get_the_smallest_shard_and_its_proof(seeds: range) -> None:
    for seed in seeds:
        instance, world_size, alignment = random_instance(seed, 5, 24), 1 + seed % 5, 1 + seed % 3
        best = smallest_shard(instance, world_size, alignment)
        found = search(instance, world_size, alignment, keep_order=False)
        assert (found.shard, found.bound) == (best, best), (seed, instance)


@settings(max_examples=400)
@given(small, worlds, alignments)
def test_a_kept_order_gets_the_smallest_shard_of_that_order(
    instance: list[Item], world_size: int, alignment: int
) -> None:
    found = search(instance, world_size, alignment, keep_order=True)
    assert found.shard == smallest_shard(instance, world_size, alignment, keep_order=True)
    assert found.items == tuple(instance)


@settings(max_examples=400)
@given(small, worlds, alignments)
def test_the_bound_never_exceeds_the_optimum(instance: list[Item], world_size: int, alignment: int) -> None:
    bound = shard_lower_bound(Counter(instance), world_size, alignment)
    assert bound <= smallest_shard(instance, world_size, alignment)


@settings(max_examples=300)
@given(st.lists(items(12), min_size=2, max_size=5), st.integers(1, 4), worlds)
def test_the_bound_for_any_split_holds_for_every_split_in_two(instance: list[Item], cut: int, world_size: int) -> None:
    parts = [part for part in (instance[:cut], instance[cut:]) if part]
    together = sum(smallest_shard(part, world_size, 2) for part in parts)
    assert split_lower_bound(Counter(instance), world_size, 2) <= together


@settings(max_examples=500)
@given(items(40), st.integers(1, 50))
def test_below_its_freedom_threshold_an_item_needs_a_divisor_of_the_shard(item: Item, shard: int) -> None:
    possible = earliest_start(0, item, shard) is not None
    assert possible == (shard >= freedom_threshold(item) or shard % item.block == 0)


def test_the_search_finds_a_feasible_shard_below_an_infeasible_one() -> None:
    # Feasibility is not monotone in S: 10 elements in blocks of 4 fit on two ranks of 8 and three of 4.
    blocks = [Item(10, 4)]
    feasible = [place_in_order(blocks, shard, 3 * shard) is not None for shard in (4, 5, 6)]
    assert feasible == [True, False, True]
    assert search(blocks, 3, 1, keep_order=False).shard == 4


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 200, 50)])
def test_larger_buffers_do_no_worse_than_the_published_algorithm(seeds: range) -> None:
    for seed in seeds:
        instance, world_size = random_instance(seed, 40, 4000), (2, 8, 64, 300)[seed % 4]
        found = search(instance, world_size, 8, keep_order=False)
        assert found.bound <= found.shard <= published_shard(instance, world_size, 8), (seed, instance)


@settings(max_examples=300)
@given(small, worlds, st.integers(1, 24))
def test_a_greedy_order_holds_every_item_and_fits(instance: list[Item], world_size: int, shard: int) -> None:
    if any(earliest_start(0, item, shard) is None for item in instance):
        return
    kinds = Counter(instance)
    order = greedy_order(kinds, sorted(kinds), shard, world_size * shard)
    if order is not None:
        assert Counter(order) == kinds
        assert place_in_order(order, shard, world_size * shard) is not None


def test_the_exact_order_succeeds_where_the_greedy_one_fails() -> None:
    # Only 1, 6, 3 fills two shards of 5: the 6 must start at 1 to be cut after its first block of 4.
    kinds = Counter([Item(6, 4), Item(3, 3), Item(1, 1)])
    assert greedy_order(kinds, sorted(kinds, reverse=True), 5, 10) is None
    assert exact_order(kinds, 5, 10) == [Item(1, 1), Item(6, 4), Item(3, 3)]
    assert exact_order(kinds, 5, 9) is None
