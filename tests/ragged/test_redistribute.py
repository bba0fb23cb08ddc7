"""Every placement becomes every other with the values in place, by the collective that moves the least."""

import pytest
import torch
import torch.distributed as dist
from cases import numbered, random_layouts, shard, uneven, world_mesh
from ranks import on_ranks
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.ragged.redistribute import to_ragged

pytestmark = pytest.mark.slow  # left out of `make test-fast`

c10d = torch.ops.c10d_functional


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@on_ranks(2, 3, 4, 8)
def test_ragged_to_ragged_moves_every_element_to_its_place() -> None:
    for shape, source, target in random_layouts():
        full = numbered(shape)
        moved = shard(full, source).redistribute(placements=[target])
        assert isinstance(moved, RaggedDTensor) and moved.placements == (target,)
        same(moved.to_local(), shard(full, target).to_local())


@on_ranks(2, 3, 4, 8)
def test_full_tensor_is_the_tensor_that_was_sharded() -> None:
    for shape, placement, _ in random_layouts():
        same(shard(numbered(shape), placement).full_tensor(), numbered(shape))


@on_ranks(2, 3, 4, 8)
def test_replicate_is_a_dtensor_of_the_whole_tensor() -> None:
    for shape, placement, _ in random_layouts():
        replicated = shard(numbered(shape), placement).redistribute(placements=[Replicate()])
        assert type(replicated) is DTensor and replicated.placements == (Replicate(),)
        same(replicated.to_local(), numbered(shape))


@on_ranks(2, 3, 4, 8)
def test_shard_becomes_ragged_and_ragged_becomes_shard() -> None:
    for shape, placement, _ in random_layouts():
        for dim in range(len(shape)):
            sharded = distribute_tensor(numbered(shape), world_mesh(), [Shard(dim)])
            ragged = to_ragged(sharded, placement)
            same(ragged.to_local(), shard(numbered(shape), placement).to_local())
            same(ragged.redistribute(placements=[Shard(dim - len(shape))]).to_local(), sharded.to_local())


@on_ranks(2, 3, 4, 8)
@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max"])
def test_partial_is_reduced(reduce_op: str) -> None:
    for shape, placement, _ in random_layouts():
        mine = numbered(shape, torch.float64) * (dist.get_rank() + 1)
        reduced = to_ragged(DTensor.from_local(mine, world_mesh(), [Partial(reduce_op)]), placement)
        scales = torch.arange(1, dist.get_world_size() + 1, dtype=torch.float64)
        scale = {"sum": scales.sum(), "avg": scales.mean(), "max": scales.max()}[reduce_op]
        torch.testing.assert_close(reduced.full_tensor(), numbered(shape, torch.float64) * scale)


@on_ranks(3)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn]
)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    full = numbered((6, 2)).to(dtype)
    ragged = shard(full, RaggedShard((0,), (1, 0, 5)))
    same(ragged.full_tensor().float(), full.float())
    same(ragged.redistribute(placements=[RaggedShard((0,), (2, 2, 2))]).full_tensor().float(), full.float())
    same(ragged.redistribute(placements=[RaggedShard((), (0, 1, 0))]).full_tensor().float(), full.float())


@on_ranks(2)
def test_an_empty_tensor_has_every_placement() -> None:
    ragged = shard(torch.empty(0, 3), RaggedShard((0,), (1, 2)))
    assert ragged.full_tensor().shape == (0, 3)
    assert ragged.redistribute(placements=[Shard(0)]).to_local().shape == (0, 3)
    assert ragged.redistribute(placements=[RaggedShard((), (0, 1))]).to_local().shape == (0,)


@on_ranks(4)
def test_each_redistribution_is_one_collective() -> None:
    full = numbered((8, 3))
    ragged = shard(full)
    sharded = distribute_tensor(full, world_mesh(), [Shard(0)])
    partial = DTensor.from_local(full, world_mesh(), [Partial()])

    def collectives(move) -> dict:
        with CommDebugMode() as comms:
            move()
        return dict(comms.get_comm_counts())

    even = RaggedShard((0,), (2, 2, 2, 2))
    assert collectives(lambda: ragged.redistribute(placements=[even])) == {c10d.all_to_all_single: 1}
    assert collectives(lambda: to_ragged(sharded, uneven(8))) == {c10d.all_to_all_single: 1}
    assert collectives(lambda: ragged.redistribute(placements=[Shard(0)])) == {c10d.all_to_all_single: 1}
    assert collectives(lambda: to_ragged(partial, uneven(8))) == {c10d.reduce_scatter_tensor: 1}
    assert collectives(ragged.full_tensor) == {torch.ops.c10d._allgather_base_: 1}
    assert collectives(shard(full, RaggedShard((), (0, 0, 1, 0))).full_tensor) == {c10d.broadcast: 1}
    assert collectives(lambda: shard(full)) == {}
    assert collectives(lambda: ragged.redistribute(placements=ragged.placements)) == {}


@on_ranks(2)
def test_a_shard_of_a_replicated_tensor_does_not_keep_it_alive() -> None:
    assert shard(torch.zeros(100, 100)).to_local().untyped_storage().nbytes() == 4 * 10000 * dist.get_rank()


@on_ranks(2)
def test_redistribution_that_cannot_be_says_why() -> None:
    ragged = shard(numbered((4, 3)))
    with pytest.raises(ValueError, match="2 units, which do not divide the 3"):
        shard(numbered((3,)), RaggedShard((0,), (1, 1)))
    with pytest.raises(NotImplementedError, match="target must be"):
        ragged.redistribute(placements=[Partial()])
    with pytest.raises(ValueError, match="placements is needed"):
        ragged.redistribute()
    with pytest.raises(ValueError, match="counts units for 3 ranks, the mesh has 2"):
        ragged.redistribute(placements=[RaggedShard((0,), (1, 1, 2))])
    with pytest.raises(ValueError, match="same mesh"):
        ragged.redistribute(dist.device_mesh.init_device_mesh("cpu", (2, 1)), [Replicate(), Replicate()])
