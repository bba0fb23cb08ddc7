"""``fully_shard`` says so where blocks make a model much larger than its parameters."""

import warnings

import pytest
import torch
from ranks import fake_world
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vescale_compile as vc
from vescale_compile.padding import warn_of_padding
from vescale_compile.planner import Rows, TensorSpec, plan_unit


def model_of_two_layers() -> torch.nn.Module:
    """Of 64 MiB each."""
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(2)))


def sharded(world_size: int, **options) -> list[str]:
    """What is said while two layers are sharded."""
    with fake_world(world_size):
        return said_of(model_of_two_layers(), **options)


def said_of(model: torch.nn.Module, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        vc.fully_shard(model, **options)
    return [text for each in said if (text := str(each.message)).startswith("fully_shard")]


def test_blocks_that_are_larger_than_a_ranks_share_are_named_with_what_helps():
    (said,) = sharded(128, quantize=vc.BlockFP8(tile=(128, 128)))
    assert "padding adds 100 % to what is gathered and reduced" in said
    assert "in unit (root), parameter '0.weight' has blocks of 524,288 elements" in said
    assert "share of the unit is 262,144" in said
    assert "a 2-D mesh, at best shards on 64 ranks, 2 replicas: padding 0.00 %" in said


@pytest.mark.parametrize(("units", "best"), [(3, "shards on 32 ranks, 4 replicas"), (4, "4 such units as one")])
def test_no_more_units_are_to_be_joined_than_there_are(units, best):
    layer = plan_unit([TensorSpec("weight", (4096, 4096), 4, Rows(128))], 128)
    with fake_world(128), pytest.warns(UserWarning, match=f"larger units, at best {best}"):
        warn_of_padding({f"layers.{index}": layer.buffers for index in range(units)}, init_device_mesh("cpu", (128,)))


@pytest.mark.parametrize(("rank", "times"), [(128, 1), (129, 0)])
def test_the_first_rank_of_the_mesh_says_it(rank, times):
    with fake_world(256, rank):
        mesh = DeviceMesh("cpu", list(range(128, 256)))
        said = said_of(model_of_two_layers(), mesh=mesh, quantize=vc.BlockFP8(tile=(128, 128)))
    assert len(said) == times


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(64, {"quantize": vc.BlockFP8(tile=(128, 128))}), (128, {})],
    ids=["blocks that divide the ranks", "no blocks"],
)
def test_nothing_is_said_where_nothing_is_padded(world_size, options):
    assert sharded(world_size, **options) == []
