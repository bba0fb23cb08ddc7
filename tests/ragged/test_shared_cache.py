"""Ranks of one machine share what compilers keep on disk."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from caches import cache_in
from cases import numbered, shard, world_mesh
from ranks import fake_world, on_ranks
from torch.distributed.tensor import DTensor

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard

FULL = numbered((4, 3))


def doubled(param: torch.Tensor) -> torch.Tensor:
    return (param * 2).sin()


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_does_not_run_what_was_compiled_for_the_run_of_another(tmp_path: Path) -> None:
    ragged = shard(FULL, RaggedShard((0,), (1, 3)))
    with cache_in(str(tmp_path)):
        for turn in range(dist.get_world_size()):
            if dist.get_rank() == turn:
                torch._dynamo.reset()
                found = torch.compile(doubled, fullgraph=True)(ragged)
            dist.barrier()
    torch.testing.assert_close(found.to_local(), doubled(ragged.to_local()))


@pytest.mark.skipif(not hasattr(DTensor, "_stable_hash_for_caching"), reason="this PyTorch pickles subclasses")
def test_layouts_that_differ_at_one_of_many_ranks_are_not_taken_for_one_another() -> None:
    ranks = 512
    with fake_world(ranks):
        found = []
        for odd in (ranks - 2, ranks - 4):
            units = [2 if rank % 2 else 1 for rank in range(ranks)]
            units[odd], units[odd + 1] = 2, 1
            layout = RaggedShard((0,), units)
            local = torch.zeros(layout.interval((768,), 0)[1])
            ragged = RaggedDTensor.from_local(local, world_mesh(), [layout], shape=(768,))
            found.append(ragged._stable_hash_for_caching())
    assert found[0] != found[1]
