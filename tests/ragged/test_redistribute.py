"""Every placement becomes every other with the values in place, by the collective that moves the least."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import numbered, random_layouts, shard, uneven, world_mesh
from ranks import fake_world, on_ranks
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

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
    padded = RaggedShard((0,), (1, 2, 2, 3))
    by_two = RaggedShard((0,), (0, 3, 5, 0))
    by_one = RaggedShard((), (0, 0, 1, 0))
    assert collectives(lambda: ragged.redistribute(placements=[even])) == {c10d.all_to_all_single: 1}
    assert collectives(lambda: to_ragged(sharded, uneven(8))) == {c10d.all_to_all_single: 1}
    assert collectives(lambda: ragged.redistribute(placements=[Shard(0)])) == {c10d.all_to_all_single: 1}
    assert collectives(lambda: to_ragged(partial, padded)) == {c10d.reduce_scatter_tensor: 1}
    assert collectives(lambda: to_ragged(partial, by_two)) == {c10d.all_reduce: 1}
    assert collectives(shard(full, padded).full_tensor) == {torch.ops.c10d._allgather_base_: 1}
    assert collectives(shard(full, by_two).full_tensor) == {torch.ops.c10d.allreduce_: 1}
    assert collectives(shard(full, by_one).full_tensor) == {torch.ops.c10d.broadcast_: 1}
    assert collectives(lambda: shard(full)) == {}
    assert collectives(lambda: ragged.redistribute(placements=ragged.placements)) == {}


class Operators(TorchDispatchMode):
    """How many there were, and the bytes of the largest memory that one returned."""

    count = largest = 0

    def __torch_dispatch__(self, func: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.count += 1
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


def mesh_of(ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


OF_1024_RANKS = {
    "one": RaggedShard((), (0, 0, 1) + (0,) * 1021),
    "two": RaggedShard((0,), (0, 1, 3) + (0,) * 1021),
    "a quarter": RaggedShard((0,), (0,) * 768 + (1,) * 256),
}
few_of_many = pytest.mark.parametrize("placement", OF_1024_RANKS.values(), ids=OF_1024_RANKS)


@few_of_many
def test_the_whole_of_what_few_ranks_hold_takes_its_own_memory(placement: RaggedShard) -> None:
    with fake_world(1024), Operators() as operators:
        RaggedDTensor.from_local(torch.empty(0), mesh_of(1024), [placement], shape=(512, 3)).full_tensor()
    assert operators.largest == 512 * 3 * 4


@few_of_many
def test_reducing_to_few_ranks_takes_the_memory_of_the_whole(placement: RaggedShard) -> None:
    with fake_world(1024), Operators() as operators:
        to_ragged(DTensor.from_local(torch.empty(512, 3), mesh_of(1024), [Partial()]), placement)
    assert operators.largest == 512 * 3 * 4


@pytest.mark.parametrize("holders", [8, 4000, 9999])
def test_the_whole_takes_few_operators_however_many_ranks_there_are(holders: int) -> None:
    placement = RaggedShard((0,), (1,) * holders + (0,) * (10_000 - holders))
    with fake_world(10_000):
        sharded = RaggedDTensor.from_local(torch.empty(1), mesh_of(10_000), [placement], shape=(holders,))
        with Operators() as operators:
            sharded.full_tensor()
    assert operators.count < 30


@on_ranks(4)
def test_what_is_added_up_has_the_bits_that_were_sharded() -> None:
    full = torch.tensor([-0.0, 0.0, float("nan"), -float("inf"), 1e-45]).repeat(8, 1)
    full.view(torch.int32)[0, 2] = 0x7F800001  # a signaling NaN
    whole = shard(full, RaggedShard((0,), (0, 3, 5, 0))).full_tensor()
    same(whole.view(torch.int32), full.view(torch.int32))


@on_ranks(2)
def test_a_shard_of_a_replicated_tensor_does_not_keep_it_alive() -> None:
    assert shard(torch.zeros(100, 100)).to_local().untyped_storage().nbytes() == 4 * 10000 * dist.get_rank()


def test_the_whole_is_refused_in_compiled_code() -> None:
    with fake_world(2):
        sharded = RaggedDTensor.from_local(torch.empty(1), mesh_of(2), [RaggedShard((0,), (1, 2))], shape=(3,))
        with pytest.raises(RuntimeError, match=r"\[rank 0\] full_tensor\(\).*shape \(3,\).*Call it outside"):
            torch.compile(lambda: sharded.full_tensor().sum(), backend="aot_eager")()


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
