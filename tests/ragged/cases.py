"""Layouts for the tests of this folder: a mesh of all ranks, and seeded random shapes and placements."""

import functools
import math
import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.ragged.redistribute import distribute_ragged


@functools.cache
def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def random_placement(rng: random.Random, shape: tuple[int, ...], world_size: int) -> RaggedShard:
    """Any placement that fits the shape: any prefix, any unit, any counts, zeros among them."""
    dims = tuple(range(rng.randint(0, len(shape))))
    blocks = math.prod(shape[: len(dims)])
    total = rng.choice([n for n in range(1, max(blocks, 1) + 1) if blocks % n == 0])
    cuts = sorted(rng.choice((0, total, rng.randint(0, total))) for _ in range(world_size - 1))
    return RaggedShard(dims, tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)))


def random_layouts() -> Iterator[tuple[tuple[int, ...], RaggedShard, RaggedShard]]:
    """Shapes with two placements each, the same on every rank; fewer for larger worlds, which are slower."""
    rng = random.Random(dist.get_world_size())
    for _ in range(48 // dist.get_world_size()):
        shape = tuple(rng.choice((1, 2, 3, 4, 6, 8, 13)) for _ in range(rng.randint(0, 4)))
        world_size = dist.get_world_size()
        yield shape, random_placement(rng, shape, world_size), random_placement(rng, shape, world_size)


def uneven(rows: int) -> RaggedShard:
    """Rows dealt out so that the first rank has none and the others have unequal numbers."""
    world_size = dist.get_world_size()
    units = [0] * world_size
    for row in range(rows):
        units[1 + (row * row) % (world_size - 1)] += 1
    return RaggedShard((0,), units)


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).to(dtype)


def shard(full: torch.Tensor, placement: RaggedShard | None = None) -> RaggedDTensor:
    """`full`, dealt out over all ranks."""
    return distribute_ragged(full, world_mesh(), placement or uneven(full.shape[0]))
