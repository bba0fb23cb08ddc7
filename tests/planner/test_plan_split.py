"""When a unit becomes several buffers, and what else would help."""

import random
from contextlib import ExitStack
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_references import check_plan

from vescale_compile.planner import Rows, TensorSpec, UnitPlan, Whole, plan_unit, remedies
from vescale_compile.planner import split as splitting
from vescale_compile.planner.models import published
from vescale_compile.planner.split import LEAST_SAVING, LEAST_SAVING_BYTES
from vescale_compile.planner.unit import plan_content


def gpt_oss_layer(*, experts_only: bool) -> list[TensorSpec]:
    """A layer of GPT-OSS-120B with blocks of 128 rows, on every matrix or on the experts' alone."""
    names = ("gate_up_proj", "down_proj") if experts_only else ("_proj", "proj.weight", "router.weight")
    rule = published("gpt-oss-120b").specs(2, lambda name, _: Rows(128) if name.endswith(names) else None)
    return rule["model.layers.0"]


KIB = 1024


def test_blocks_without_a_common_multiple_get_buffers_of_their_own() -> None:
    unit = [TensorSpec("a", (640, 7 * KIB), 2, Rows(1)), TensorSpec("b", (640, 11 * KIB), 2, Rows(1))]
    plan = plan_unit(unit, 640)
    assert [set(buffer.offsets) for buffer in plan.buffers] == [{"b"}, {"a"}]
    assert plan.padding_numel == 0
    assert plan.joint_lower_bound == 77 * KIB, "in one buffer both blocks would have to divide S"


def test_blocks_that_suit_one_another_stay_together() -> None:
    unit = [TensorSpec("a", (640, 2 * KIB), 2, Rows(1)), TensorSpec("b", (640, 6 * KIB), 2, Rows(1))]
    plan = plan_unit(unit, 320)
    assert len(plan.buffers) == 1 and plan.padding_numel == 2 * 320 * KIB


def test_a_split_that_saves_a_small_share_is_not_made() -> None:
    unit = [TensorSpec(n, (640, w * KIB), 2, Rows(1)) for n, w in [("a", 70), ("b", 110)]]
    plan = plan_unit(unit, 2)
    assert len(plan.buffers) == 1
    assert 0 < plan.padding_numel <= LEAST_SAVING * plan.numel


def test_a_split_that_saves_few_bytes_is_not_made() -> None:
    unit = [TensorSpec("a", (640, 7), 2, Rows(1)), TensorSpec("b", (640, 11), 2, Rows(1))]
    plan = plan_unit(unit, 640, alignment_bytes=1)
    assert len(plan.buffers) == 1
    assert (plan.shard_numel - 18) * 2 < LEAST_SAVING_BYTES


def matrices(sizes: int, step: int, seed: int) -> list[TensorSpec]:
    """As many as ``sizes``, their rows in one piece each and as wide as some multiple of ``step``."""
    rng = random.Random(seed)
    return [
        TensorSpec(f"w{i}", (rng.randint(2000, 4000), step * rng.randint(300 // step + 1, 4000 // step)), 4, Rows(1))
        for i in range(sizes)
    ]


def planned_with(unit: list[TensorSpec], world_size: int, **constants: int) -> UnitPlan:
    """The plan that other constants of the split give."""
    with ExitStack() as stack:
        stack.callback(plan_content.cache_clear)
        for name, value in constants.items():
            stack.enter_context(mock.patch.object(splitting, name, value))
        plan_content.cache_clear()
        return plan_unit(unit, world_size)


def priced(plan: UnitPlan) -> float:
    """What the split minimizes, relative to a rank's share of the unit, where 16 KiB are less than a per cent."""
    return plan.shard_numel * plan.buffers[0].world_size / plan.numel + LEAST_SAVING * len(plan.buffers)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("sizes", "step"), [(8, 1), (10, 1), (10, 8), (12, 64), (16, 64), (31, 8)])
def test_many_sizes_of_blocks_pad_little(sizes: int, step: int, seed: int) -> None:
    unit = matrices(sizes, step, seed)
    plan = plan_unit(unit, 64)
    assert plan.padding_percent < 3.5
    apart = [plan_unit([t for t in unit if t.block_numel == block], 64) for block in {t.block_numel for t in unit}]
    assert priced(plan) <= priced(UnitPlan(tuple(buffer for each in apart for buffer in each.buffers)))


@pytest.mark.parametrize("step", [1, 8, 64])
@pytest.mark.parametrize("sizes", [8, 9])
def test_joined_pairs_lead_to_about_the_best_of_all_partitions(sizes: int, step: int) -> None:
    for seed in range(3):
        unit = matrices(sizes, step, seed)
        assert priced(plan_unit(unit, 64)) <= 1.02 * priced(planned_with(unit, 64, MOST_CLASSES=sizes))


def test_blocks_that_suit_one_another_only_by_threes_share_a_buffer() -> None:
    # Six rows each: one needs S of one row, and any number of them S of three, where each has a place.
    unit = [TensorSpec(f"w{i}", (6, 100_000 + 4 * i), 4, Rows(1)) for i in range(10)]
    plan = plan_unit(unit, 64)
    assert len(plan.buffers) == 1
    assert plan.shard_numel == pytest.approx(3 * 100_000, rel=0.001)


def test_sizes_that_fit_anywhere_are_the_ones_that_are_not_told_apart() -> None:
    # The vectors' blocks are larger than those of the matrices, but no shard is so small that they must divide it.
    vectors = [TensorSpec(f"v{i}", (5000 + 3 * i,), 4, Whole()) for i in range(2 * splitting.MOST_SIZES)]
    plan = plan_unit(matrices(10, 1, seed=0) + vectors, 64)
    assert plan.padding_percent < 3.5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=8, max_size=16), st.integers(2, 9))
@pytest.mark.parametrize("most_sizes", [6, 64])
def test_plans_of_many_sizes_place_all_tensors_whole_in_blocks(
    most_sizes: int, shapes: list[tuple[int, int]], world_size: int
) -> None:
    unit = [TensorSpec(f"w{i}", shape, 4, Rows(1)) for i, shape in enumerate(shapes)]
    plan = planned_with(unit, world_size, MOST_SIZES=most_sizes, MOST_CLASSES=3, LEAST_SAVING_BYTES=1)
    check_plan(plan, unit, world_size, alignment_bytes=16)


def test_experts_of_gpt_oss_on_1024_ranks_hold_nine_blocks_of_128_rows_of_2880() -> None:
    plan = plan_unit(gpt_oss_layer(experts_only=True), 1024)
    assert plan.shard_numel == 9 * 128 * 2880
    assert plan.padding_percent == pytest.approx(5.74, abs=0.005)
    assert plan.shard_numel == plan.split_lower_bound, "no number of buffers pads less"


def test_a_whole_layer_of_gpt_oss_is_split_where_one_buffer_would_double() -> None:
    plan = plan_unit(gpt_oss_layer(experts_only=False), 1024)
    assert plan.joint_lower_bound * 1024 / plan.numel == pytest.approx(2.115, abs=0.001)
    assert plan.padding_percent == pytest.approx(22.45, abs=0.005)
    assert all(buffer.shard_numel == buffer.lower_bound for buffer in plan.buffers)


def test_remedies_hold_what_they_promise() -> None:
    unit = gpt_oss_layer(experts_only=False)
    now = plan_unit(unit, 1024)
    found = remedies(unit, 1024)
    assert {remedy.joined for remedy in found} == {1, 2, 3}
    for remedy in found:
        assert remedy.shard_ranks * remedy.replicas == 1024
        copies = [
            TensorSpec(f"{copy}.{t.name}", t.shape, t.itemsize, t.granularity)
            for copy in range(remedy.joined)
            for t in unit
        ]
        plan = plan_unit(copies, remedy.shard_ranks)
        assert plan.padding_percent == remedy.padding_percent < now.padding_percent
        assert plan.shard_numel == pytest.approx(remedy.memory_factor * remedy.joined * now.shard_numel)


def test_a_unit_that_has_no_like_is_not_joined() -> None:
    found = remedies(gpt_oss_layer(experts_only=False), 1024, alike=1)
    assert found and all(remedy.joined == 1 for remedy in found)


def test_no_remedy_is_offered_where_none_is_needed() -> None:
    assert remedies([TensorSpec("w", (1 << 20,), 2)], 64) == []
