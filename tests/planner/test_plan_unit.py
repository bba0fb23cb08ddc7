"""``plan_unit`` and what its plans say about tensors, ranks and placements."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_references import check_plan

import vescale_compile
from vescale_compile.planner import Elements, Rows, TensorSpec, UnitPlan, Whole, plan_unit
from vescale_compile.planner.layout import Item, Layout
from vescale_compile.planner.plan import BufferPlan

granularities = st.one_of(
    st.none(), st.builds(Elements, st.integers(1, 12)), st.builds(Rows, st.integers(1, 5)), st.just(Whole())
)
shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def units(draw: st.DrawFn) -> list[TensorSpec]:
    count = draw(st.integers(1, 6))
    return [TensorSpec(f"t{i}", draw(shapes), draw(st.sampled_from([2, 4])), draw(granularities)) for i in range(count)]


@settings(max_examples=300)
@given(units(), st.integers(1, 6), st.sampled_from([1, 16, 24]), st.booleans())
def test_every_plan_places_all_tensors_whole_in_blocks(
    unit: list[TensorSpec], world_size: int, alignment_bytes: int, keep_order: bool
) -> None:
    plan = plan_unit(unit, world_size, alignment_bytes=alignment_bytes, keep_order=keep_order)
    check_plan(plan, unit, world_size, alignment_bytes)


@settings(max_examples=200)
@given(units(), st.integers(1, 6))
def test_ragged_shards_describe_the_intervals(unit: list[TensorSpec], world_size: int) -> None:
    for buffer in plan_unit(unit, world_size).buffers:
        for tensor in buffer.tensors:
            dims, local_units = buffer.ragged_shard(tensor.name)
            assert dims == tuple(range(len(dims)))
            unit_numel, rest = divmod(tensor.numel, sum(local_units))
            assert rest == 0
            assert unit_numel % math.prod(tensor.shape[len(dims) :]) == 0, "the unit is whole outside dims"
            starts, ends = zip(*(buffer.interval(tensor.name, rank) for rank in range(world_size)), strict=True)
            assert starts == (0, *ends[:-1]) and ends[-1] == tensor.numel
            assert [e - s for s, e in zip(starts, ends, strict=True)] == [n * unit_numel for n in local_units]


@pytest.mark.parametrize(
    ("shape", "granularity", "block", "dims", "units_"),
    [
        ((8, 6), None, 1, (0, 1), 48),
        ((8, 6), Elements(12), 12, (0, 1), 4),
        ((8, 6), Rows(2), 12, (0,), 4),
        ((7, 6), Rows(2), 12, (0,), 7),  # the last block has one row, so units are rows
        ((2, 4, 6), Rows(2), 12, (0, 1), 4),  # rows of a stack of matrices
        ((2, 3, 6), Rows(2), 12, (0, 1), 3),  # the second block joins two matrices
        ((9,), Rows(2), 2, (0,), 9),
        ((9,), Rows(100), 9, (0,), 1),
        ((8, 6), Whole(), 48, (), 1),
        ((), None, 1, (), 1),
        ((), Rows(1), 1, (), 1),
    ],
)
def test_granularities(shape: tuple[int, ...], granularity, block: int, dims, units_: int) -> None:
    spec = TensorSpec("w", shape, 4, granularity)
    assert spec.block_numel == block
    buffer = plan_unit([spec], 3).buffers[0]
    found, local_units = buffer.ragged_shard("w")
    assert (found, sum(local_units)) == (dims, units_)


def test_a_whole_tensor_is_on_one_rank() -> None:
    unit = [TensorSpec(f"w{i}", (6, 4), 4, Whole()) for i in range(3)]
    buffer = plan_unit(unit, 3).buffers[0]
    assert buffer.shard_numel == 24
    hot = sorted(buffer.ragged_shard(t.name)[1] for t in unit)
    assert hot == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_tensors_of_different_itemsize_have_buffers_of_their_own() -> None:
    unit = [TensorSpec("a", (8,), 4), TensorSpec("b", (8,), 2), TensorSpec("c", (8,), 4)]
    held = {buffer.tensors[0].itemsize: set(buffer.offsets) for buffer in plan_unit(unit, 2).buffers}
    assert held == {4: {"a", "c"}, 2: {"b"}}


def test_a_shard_is_a_multiple_of_the_alignment_in_bytes() -> None:
    assert plan_unit([TensorSpec("a", (9,), 2)], 1).buffers[0].shard_numel == 16
    assert plan_unit([TensorSpec("a", (9,), 4)], 1).buffers[0].shard_numel == 12
    assert plan_unit([TensorSpec("a", (9,), 2)], 1, alignment_bytes=1).buffers[0].shard_numel == 9


def test_a_kept_order_costs_padding_that_a_free_one_avoids() -> None:
    unit = [TensorSpec(n, (s,), 1, Whole()) for n, s in [("a", 3), ("b", 4), ("c", 1), ("d", 4)]]
    kept = plan_unit(unit, 3, alignment_bytes=1, keep_order=True).buffers[0]
    free = plan_unit(unit, 3, alignment_bytes=1).buffers[0]
    assert [t.name for t in kept.tensors] == ["a", "b", "c", "d"]
    assert (kept.shard_numel, free.shard_numel) == (5, 4)


def test_units_of_equal_content_share_one_layout() -> None:
    first, second = (
        plan_unit([TensorSpec(f"{layer}.{n}", (640, n), 2, Rows(16)) for n in (24, 40)], 64)
        for layer in ("layers.0", "layers.1")
    )
    assert first.buffers[0].layout is second.buffers[0].layout
    assert list(second.buffers[0].offsets) == [
        name.replace("layers.0", "layers.1") for name in first.buffers[0].offsets
    ]


def test_equal_tensors_keep_their_relative_order() -> None:
    unit = [TensorSpec(f"w{i}", (4, 4), 4, Rows(2)) for i in range(5)]
    assert [t.name for t in plan_unit(unit, 2).buffers[0].tensors] == [t.name for t in unit]


PLAN_IN_A_NEW_PROCESS = """
import importlib.util, json, sys, types
package = types.ModuleType("vescale_compile")
package.__path__ = [sys.argv[1]]
sys.modules["vescale_compile"] = package
from vescale_compile.planner import Rows, TensorSpec, plan_unit
unit = [TensorSpec(f"w{i}", (100 + 7 * i, 64 * (1 + i % 3)), 2, Rows(1 + i % 4)) for i in range(24)]
wide = [TensorSpec(f"w{i}", (3000 + i, 8 * (37 + 31 * i)), 2, Rows(1)) for i in range(12)]
buffers = plan_unit(unit, 48).buffers + plan_unit(wide, 48).buffers
assert not any(name.split(".")[0] in ("torch", "numpy") for name in sys.modules), "the planner imported torch"
print(json.dumps([[buffer.shard_numel, buffer.offsets] for buffer in buffers]))
"""


def test_plans_are_equal_in_every_process_and_need_no_torch() -> None:
    folder = str(Path(vescale_compile.__file__).parent)
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PLAN_IN_A_NEW_PROCESS, folder],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1")
    ]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])[0][0] > 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"tensors": []}, "at least one tensor"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 2.0}, "world_size is 2.0; it must be an int"),
        ({"alignment_bytes": 0}, "alignment_bytes is 0"),
        ({"tensors": [TensorSpec("a", (2,), 4), TensorSpec("a", (3,), 4)]}, "'a' is given more than once"),
    ],
)
def test_plan_unit_says_what_is_wrong(arguments: dict, complaint: str) -> None:
    valid = {"tensors": [TensorSpec("a", (2,), 4)], "world_size": 2}
    with pytest.raises(ValueError, match=complaint):
        plan_unit(**(valid | arguments))


@pytest.mark.parametrize(
    ("make", "error", "complaint"),
    [
        (lambda: TensorSpec("w", (3, 0), 4), ValueError, r"'w': shape \(3, 0\) has no elements"),
        (lambda: TensorSpec("w", (-1, 2), 4), ValueError, "'w': .* negative size"),
        (lambda: TensorSpec("w", (2,), 0), ValueError, "'w': itemsize is 0"),
        (lambda: TensorSpec("w", (2,), 4, 128), TypeError, r"'w': granularity is 128; give Elements\(n\)"),
        (lambda: Rows(0), ValueError, r"Rows\(0\): .* at least 1"),
        (lambda: Elements(-3), ValueError, r"Elements\(-3\)"),
        (lambda: Rows(1.5), TypeError, "is an int, not float"),
    ],
)
def test_specs_say_what_is_wrong(make, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        make()


def test_questions_about_absent_tensors_and_ranks_are_refused() -> None:
    buffer = plan_unit([TensorSpec("a", (2,), 4)], 2).buffers[0]
    with pytest.raises(KeyError, match="no tensor 'b' in this buffer; it holds a"):
        buffer.ragged_shard("b")
    with pytest.raises(ValueError, match="rank 2 of tensor 'a': ranks are 0 to 1"):
        buffer.interval("a", 2)


def test_a_buffer_refuses_tensors_that_are_not_its_layouts() -> None:
    layout = Layout((Item(4, 1),), (0,), world_size=1, shard_numel=8, alignment=8)
    with pytest.raises(ValueError, match="not those of the tensors"):
        BufferPlan((TensorSpec("a", (5,), 2),), layout, 8)


def test_a_unit_refuses_a_tensor_in_two_buffers() -> None:
    buffer = plan_unit([TensorSpec("a", (4,), 2)], 1).buffers[0]
    with pytest.raises(ValueError, match="'a' is given more than once"):
        UnitPlan((buffer, buffer))


def test_the_drawing_shows_ranks_tensors_and_padding() -> None:
    unit = [TensorSpec("big", (3, 8), 4, Rows(1)), TensorSpec("small", (4,), 4)]
    lines = str(plan_unit(unit, 2)).splitlines()
    assert lines[0].startswith("28 elements on 2 ranks: S = 16, padding 4 (14.29 %), bound 16 (gap 0.00 %)")
    assert [line.split("|")[1] for line in lines[1:3]] == ["a" * 64, "a" * 32 + "b" * 16 + "." * 16]
    assert lines[3].strip() == "a big [3, 8] at 0, blocks of 8"


def test_the_drawing_of_many_ranks_shows_the_first_and_last() -> None:
    ranks = [
        line.split("|")[0].strip()
        for line in str(plan_unit([TensorSpec("w", (4096,), 4)], 256)).splitlines()
        if "|" in line
    ]
    assert ranks == [*map(str, range(13)), "254", "255"]
