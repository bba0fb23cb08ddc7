"""When a unit becomes several buffers, and what else would help."""

import pytest

from vescale_compile.planner import Rows, TensorSpec, plan_unit, remedies
from vescale_compile.planner.models import published
from vescale_compile.planner.split import LEAST_SAVING, LEAST_SAVING_BYTES


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
