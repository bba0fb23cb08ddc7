"""Blocks of a tensor: which there are, where it may be cut, and the rectangles that kernels see."""

import math

import pytest
import torch

from vescale_compile import Elements, Rows
from vescale_compile.optim.blocks import BlockGrid, Blocks, rectangles

SHAPES = [(64, 96), (50, 200), (4, 33, 40), (5000,), (4096,)]


def numbered(grid: BlockGrid, numel: int) -> torch.Tensor:
    """Each element's block, written through the rectangles' strides; -1 where no rectangle is."""
    found = torch.full((numel,), -1)
    for r in rectangles(grid, numel):
        blocks = torch.arange(grid.count).as_strided(r.scale_size, r.scale_stride, r.scale_start)
        found.as_strided(r.size, r.stride, r.start).copy_(blocks.expand(r.size))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_consecutive_elements_share_a_block(shape: tuple[int, ...]) -> None:
    grid = Blocks(block=96).grid(shape)
    assert torch.equal(numbered(grid, grid.numel), torch.arange(math.prod(shape)) // 96)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1])
def test_tiles_are_read_from_lines_of_the_last_dimension(shape: tuple[int, ...]) -> None:
    grid = Blocks(tile=(8, 32)).grid(shape)
    cols = shape[-1]
    lines = torch.arange(math.prod(shape)) // cols
    columns = torch.arange(math.prod(shape)) % cols
    assert torch.equal(numbered(grid, grid.numel), lines // 8 * -(-cols // 32) + columns // 32)


@pytest.mark.parametrize("blocks", [Blocks(block=96), Blocks(tile=(8, 32))])
def test_shards_of_whole_bands_hold_the_blocks_of_the_whole(blocks: Blocks) -> None:
    for shape in SHAPES:
        grid = blocks.grid(shape)
        cut = 3 * grid.band
        assert not grid.cuts(cut) and grid.cuts(cut + 1)
        parts = [numbered(grid, cut), numbered(grid, grid.numel - cut) + grid.blocks_before(cut)]
        assert torch.equal(torch.cat(parts), numbered(grid, grid.numel))


def test_full_blocks_are_one_rectangle() -> None:
    for blocks, shape in ((Blocks(), (64, 96)), (Blocks(tile=(32, 32)), (64, 96))):
        (rectangle,) = rectangles(blocks.grid(shape), math.prod(shape))
        assert rectangle.whole


def test_small_tensors_have_no_blocks() -> None:
    assert Blocks().grid((4095,)) is None and Blocks().granularity((4095,)) is None
    assert Blocks().grid((4096,)) is not None


def test_granularity_keeps_blocks_and_tiles_whole() -> None:
    assert Blocks().granularity((64, 96)) == Elements(256)
    assert Blocks(tile=(32, 16)).granularity((64, 96)) == Rows(32)
    assert Blocks(block=64, tile=(32, 16)).granularity((8192,)) == Elements(64)


@pytest.mark.parametrize("shape", [(16, 512), (512, 16)])
def test_a_tile_larger_than_the_tensor_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"32 x 32 is larger than the tensor, \d+ lines of \d+ elements.*smaller"):
        Blocks(tile=(32, 32)).grid(shape)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block": 0}, ValueError, "block holds 0"),
        ({"block": 2.5}, TypeError, r"block holds 2\.5"),
        ({"block": True}, TypeError, "block holds True"),
        ({"tile": (32,)}, TypeError, r"tile is \(32,\)"),
        ({"tile": 32}, TypeError, "tile is 32"),
        ({"tile": (32, -1)}, ValueError, "tile holds -1"),
    ],
)
def test_wrong_sizes_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Blocks(**options)
