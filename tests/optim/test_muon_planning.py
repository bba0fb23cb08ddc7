"""Roots, chunks, exchanges and the Newton-Schulz iteration, each by itself."""

import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist
from muon_cases import random_tensors
from ranks import fake_world, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.balance import choose_roots
from vescale_compile.optim.exchange import PackedExchange
from vescale_compile.optim.matrices import Matrix, MatrixPlan, matrices_of, plan_matrices
from vescale_compile.optim.muon import Muon
from vescale_compile.optim.newton_schulz import NewtonSchulz, flops, orthogonalize


def loads(costs: list[int], roots: list[int], ranks: int) -> list[int]:
    totals = [0] * ranks
    for cost, root in zip(costs, roots, strict=True):
        totals[root] += cost
    return totals


def least_largest_load(costs: list[int], ranks: int) -> int:
    every = itertools.product(range(ranks), repeat=len(costs))
    return min(max(loads(costs, list(roots), ranks)) for roots in every)


def test_the_largest_load_is_within_three_percent_of_grahams_bound() -> None:
    rng = random.Random(0)
    for _ in range(60):
        ranks, costs = rng.randint(1, 3), [rng.randint(1, 20) for _ in range(rng.randint(1, 7))]
        held = [{rng.randrange(ranks): 1} for _ in costs]
        roots = choose_roots(costs, held, ranks, pinned=[None] * len(costs))
        bound = (4 / 3 - 1 / (3 * ranks)) * least_largest_load(costs, ranks)
        assert max(loads(costs, roots, ranks)) <= 1.03 * bound


def test_longest_first() -> None:
    # By order, 1, 1, 2 would end with loads of 1 and 3.
    roots = choose_roots([1, 1, 2], [{}, {}, {}], 2, pinned=[None] * 3)
    assert sorted(loads([1, 1, 2], roots, 2)) == [2, 2]


def test_among_equal_loads_work_stays_where_its_data_is() -> None:
    held = [{0: 10}, {1: 10}, {1: 4, 0: 6}, {0: 3, 1: 7}]
    assert choose_roots([5, 5, 3, 3], held, 2, pinned=[None] * 4) == [0, 1, 0, 1]


def test_pinned_work_counts_as_load() -> None:
    roots = choose_roots([8, 4, 4], [{0: 1}, {0: 1}, {0: 1}], 2, pinned=[0, None, None])
    assert roots == [0, 1, 1]


def test_the_cost_counts_the_multiplications_of_a_step() -> None:
    # X X^T is 3 x 5 x 3; A A is 3 x 3 x 3; B X is 3 x 3 x 5; two operations for each.
    assert flops((3, 5), steps=1) == flops((5, 3), steps=1) == 2 * (3 * 5 * 3 + 3 * 3 * 3 + 3 * 3 * 5)
    assert flops((3, 5), steps=7) == 7 * flops((3, 5), steps=1)


def test_an_orthogonalized_matrix_keeps_its_singular_vectors_and_loses_its_scale() -> None:
    for shape, matrix in zip([(20, 50), (50, 20)], random_tensors([(20, 50), (50, 20)], seed=0), strict=True):
        result = orthogonalize((1000 * matrix).bfloat16(), NewtonSchulz()).float()
        assert result.shape == shape
        assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.5
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert ((u.T @ result @ v.T).diagonal() > 0.5).all()


def random_plan(rng: random.Random) -> MatrixPlan:
    ranks = rng.randint(1, 5)
    matrices: list[Matrix] = []
    for param in range(rng.randint(1, 6)):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.choice((2, 3))))
        numel = math.prod(shape)
        cuts = [0, *sorted(rng.randint(0, numel) for _ in range(ranks - 1)), numel]
        matrices += matrices_of(
            param, shape, {rank: (a, b) for rank, (a, b) in enumerate(itertools.pairwise(cuts)) if a < b}
        )
    costs = [flops(matrix.shape, 5) for matrix in matrices]
    return plan_matrices(matrices, costs, ranks, chunk_numel=rng.choice((1, 50, 10**6)))


def test_the_parts_of_a_matrix_cover_it() -> None:
    rng = random.Random(1)
    for _ in range(200):
        for matrix in random_plan(rng).matrices:
            stops = [0, *(part.stop for part in matrix.parts)]
            assert stops == [*(part.start for part in matrix.parts), math.prod(matrix.shape)]
            assert all(part.start < part.stop for part in matrix.parts)


def test_a_matrix_is_in_one_chunk_or_whole_on_its_root() -> None:
    rng = random.Random(2)
    for _ in range(200):
        plan = random_plan(rng)
        exchanged = [i for chunk in plan.chunks for i in chunk]
        assert len(set(exchanged)) == len(exchanged) and all(plan.chunks)
        for i, (matrix, root) in enumerate(zip(plan.matrices, plan.roots, strict=True)):
            whole = [part.rank for part in matrix.parts] == [root]
            assert (i not in exchanged) == whole == (i in plan.whole_on(root))


def test_a_stack_is_one_matrix_for_each_expert_computed_where_it_is_whole() -> None:
    matrices = list(matrices_of(0, (4, 2, 3), {0: (0, 12), 1: (12, 15), 2: (15, 24)}))
    assert [(m.start, m.shape) for m in matrices] == [(0, (2, 3)), (6, (2, 3)), (12, (2, 3)), (18, (2, 3))]
    plan = plan_matrices(matrices, [1, 1, 1, 1], 3, chunk_numel=100)
    assert plan.roots == (0, 0, 1, 2)  # the third is cut; both of its holders may take it, rank 1 is idle
    assert plan.chunks == ((2,),)


def test_every_root_computes_about_the_same_in_each_chunk() -> None:
    matrices = [m for i in range(32) for m in matrices_of(i, (4, 4), {0: (0, 8), 1: (8, 16)})]
    plan = plan_matrices(matrices, [1] * 32, 2, chunk_numel=16)
    assert len(plan.chunks) == 8
    for chunk in plan.chunks:
        assert [[plan.roots[i] for i in chunk].count(rank) for rank in range(2)] == [2, 2]


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_exchange_delivers_every_run_in_the_order_expected(dtype: torch.dtype) -> None:
    me, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(0)
    # Runs (from, to, number of elements, value); each rank sends and expects its own, in this order.
    runs = [(rng.randrange(world), rng.randrange(world), rng.randint(0, 5), value) for value in range(40)]
    exchange = PackedExchange(
        [(to, torch.full((numel,), float(value))) for sender, to, numel, value in runs if sender == me],
        [(sender, numel) for sender, to, numel, _ in runs if to == me],
        dtype=dtype,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
    )
    expected = [torch.full((numel,), float(value), dtype=dtype) for _, to, numel, value in runs if to == me]
    assert all(torch.equal(a, b) for a, b in zip(exchange.wait(), expected, strict=True))


def test_the_granularity_cuts_stacks_between_experts_and_matrices_anywhere() -> None:
    granularity = {
        "layers.0.experts.up": ((8, 6, 10), vc.Rows(6)),
        "layers.0.attention.q": ((16, 16), None),
        "layers.0.norm": ((16,), None),
        "embed.positions": ((8, 6, 10), None),
    }
    for name, (shape, expected) in granularity.items():
        assert Muon.granularity(name, nn.Parameter(torch.zeros(shape))) == expected
    with fake_world(9):  # fewer experts than ranks: whole ones would cost padding
        assert Muon.granularity("layers.0.experts.up", nn.Parameter(torch.zeros(8, 6, 10))) is None


def test_experts_are_counted_against_the_ranks_that_shard_not_against_replicas() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.zeros(4, 6, 10))

    def ends(replicas: int, shards: int) -> list[int]:
        with fake_world(8):
            mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
            layer = vc.fully_shard(Layer(), mesh=mesh, granularity=Muon.granularity)
            return [stop for _, stop in layer.experts.placement.intervals((4, 6, 10))]

    assert all(stop % 60 == 0 for stop in ends(2, 4))
    assert any(stop % 60 for stop in ends(1, 8))
