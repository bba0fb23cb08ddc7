"""``fully_shard`` says so where blocks make a model much larger than its parameters."""

import warnings

import pytest
import torch
from ranks import fake_world

import vescale_compile as vc


def sharded(world_size: int, **options) -> list[str]:
    """What is said while two layers of 64 MiB each are sharded."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(2)))
    with fake_world(world_size), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        vc.fully_shard(model, **options)
    return [text for each in said if (text := str(each.message)).startswith("fully_shard")]


def test_blocks_that_are_larger_than_a_ranks_share_are_named_with_what_helps():
    (said,) = sharded(128, quantize=vc.BlockFP8(tile=(128, 128)))
    assert "padding adds 100 % to what is gathered and reduced" in said
    assert "in unit (root), parameter '0.weight' has blocks of 524,288 elements" in said
    assert "share of the unit is 262,144" in said
    assert "2 such units as one: padding 0.00 %" in said


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(64, {"quantize": vc.BlockFP8(tile=(128, 128))}), (128, {})],
    ids=["blocks that divide the ranks", "no blocks"],
)
def test_nothing_is_said_where_nothing_is_padded(world_size, options):
    assert sharded(world_size, **options) == []
