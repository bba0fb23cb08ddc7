"""Distributed checkpoints of RaggedDTensors load under any other layout and number of ranks."""

import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import random_layouts, shard, world_mesh
from ranks import on_ranks, run_on_ranks
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale_compile.ragged.checkpoint import run_to_boxes
from vescale_compile.ragged.placement import RaggedShard

pytestmark = pytest.mark.slow  # left out of `make test-fast`

SHAPE = (6, 5, 2)
FULL = torch.arange(60.0).reshape(SHAPE)


def test_a_run_is_few_boxes_that_cover_it_in_order() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(0, 4)))
        numel = math.prod(shape)
        start, stop = sorted((rng.randint(0, numel), rng.randint(0, numel)))
        boxes = run_to_boxes(start, stop, shape)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        whole = torch.arange(numel).reshape(shape)
        slices = [
            whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
            for offsets, sizes in boxes
        ]
        covered = torch.cat(slices) if slices else torch.empty(0, dtype=torch.int64)
        assert torch.equal(covered, torch.arange(start, stop))


def tensors(layout: RaggedShard) -> dict[str, torch.Tensor]:
    one_rank = RaggedShard((), (0,) * (dist.get_world_size() - 1) + (1,))
    return {
        "weight": shard(FULL, layout),
        "scalar": shard(torch.tensor(7.0), one_rank),
        "bias": shard(FULL[0, :, 0].clone(), one_rank).to(torch.bfloat16),
    }


def save(path: str, units: tuple[int, ...]) -> None:
    dcp.save(tensors(RaggedShard((0, 1, 2), units)), checkpoint_id=path)


def load(path: str, units: tuple[int, ...]) -> None:
    expected = tensors(RaggedShard((0, 1, 2), units))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=path)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].full_tensor(), tensor.full_tensor())


@pytest.mark.parametrize("ranks", [2, 4])
def test_load_at_another_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    run_on_ranks(3, save, str(tmp_path), (7, 0, 53))
    run_on_ranks(ranks, load, str(tmp_path), {2: (31, 29), 4: (0, 1, 58, 1)}[ranks])


@on_ranks(3)
def test_load_into_a_plain_tensor_and_from_and_into_shard(tmp_path: Path) -> None:
    dcp.save({"x": shard(FULL, RaggedShard((0, 1, 2), (7, 0, 53)))}, checkpoint_id=tmp_path / "ragged")
    for loaded in (torch.zeros(SHAPE), distribute_tensor(torch.zeros(SHAPE), world_mesh(), [Shard(1)])):
        dcp.load(state := {"x": loaded}, checkpoint_id=tmp_path / "ragged")
        full = state["x"].full_tensor() if isinstance(loaded, DTensor) else state["x"]
        assert torch.equal(full, FULL)
    dcp.save({"x": distribute_tensor(FULL, world_mesh(), [Shard(1)])}, checkpoint_id=tmp_path / "sharded")
    dcp.load(state := {"x": shard(torch.zeros(SHAPE))}, checkpoint_id=tmp_path / "sharded")
    assert torch.equal(state["x"].full_tensor(), FULL)


@on_ranks(2)
def test_an_asynchronous_save_holds_the_values_of_its_start(tmp_path: Path) -> None:
    weight = shard(FULL, RaggedShard((0, 1, 2), (13, 47)))
    saving = dcp.async_save({"x": weight}, checkpoint_id=tmp_path)
    weight.zero_()
    saving.result()
    dcp.load({"x": weight}, checkpoint_id=tmp_path)
    assert torch.equal(weight.full_tensor(), FULL)


@on_ranks(4)
def test_shards_are_read_and_written_in_place() -> None:
    for shape, placement, _ in random_layouts():
        tensor = shard(torch.zeros(shape), placement)
        pointers = []
        for item in tensor.__create_write_items__("x", tensor):
            box = tensor.__get_tensor_shard__(item.index)
            assert box.numel() > 0 and box.shape == item.tensor_data.chunk.sizes
            pointers.append((box.data_ptr(), box.numel()))
        held = tensor.to_local()
        starts = [held.data_ptr() + 4 * sum(n for _, n in pointers[:i]) for i in range(len(pointers))]
        assert [pointer for pointer, _ in pointers] == starts
        assert sum(n for _, n in pointers) == held.numel()
