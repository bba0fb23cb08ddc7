"""What a step of Muon sends: each matrix once out and once back, in few exchanges beside the computing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from muon_cases import MATRICES, STACKS, give_grads, muon, random_tensors, shard, uneven, world_mesh
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_compile.optim import exchange, muon_step
from vescale_compile.optim import muon as muon_module
from vescale_compile.optim.muon import Muon
from vescale_compile.ragged.placement import RaggedShard

pytestmark = pytest.mark.slow  # left out of `make test-fast`

SHAPES = MATRICES + STACKS


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """Launches and waits of exchanges, with the elements that leave this rank, and computations, in order."""
    events: list[tuple[str, Any]] = []

    def launch(output: Tensor, sent: Tensor, received: list[int], splits: list[int], **options: Any) -> Any:
        assert sent.dtype == output.dtype == torch.bfloat16
        assert splits[dist.get_rank()] == received[dist.get_rank()] == 0
        events.append(("launch", sum(splits)))
        return real_launch(output, sent, received, splits, **options)

    def wait(self: exchange.PackedExchange) -> list[Tensor]:
        events.append(("wait", None))
        return real_wait(self)

    def compute(matrix: Tensor, options: Any) -> Tensor:
        events.append(("compute", tuple(matrix.shape)))
        return real_compute(matrix, options)

    real_launch, real_wait = dist.all_to_all_single, exchange.PackedExchange.wait
    real_compute = muon_step.orthogonalize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", launch)
        patch.setattr(exchange.PackedExchange, "wait", wait)
        patch.setattr(muon_step, "orthogonalize", compute)
        yield events


def ready(params: list[Tensor], **options: Any) -> Muon:
    """An optimizer of `params`, which have gradients."""
    give_grads(params, random_tensors([tuple(param.shape) for param in params], seed=1))
    return muon(params, **options)


def cut_anywhere() -> list[Tensor]:
    return [shard(full, uneven(tuple(full.shape), seed=1)) for full in random_tensors(SHAPES, seed=0)]


def launched(events: list[tuple[str, Any]]) -> list[int]:
    return [elements for kind, elements in events if kind == "launch"]


@on_ranks(2, 4)
def test_every_element_that_is_not_at_its_root_travels_once_out_and_once_back() -> None:
    optimizer = ready(cut_anywhere())
    with recorded() as events:
        optimizer.step()
    plan = next(iter(optimizer._plans.values()))
    away = sum(
        part.stop - part.start
        for matrix, root in zip(plan.matrices, plan.roots, strict=True)
        for part in matrix.parts
        if part.rank != root
    )
    assert away > 0
    sent: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sent, sum(launched(events)))
    assert sum(sent) == 2 * away


@on_ranks(3)
def test_a_step_is_one_small_all_reduce_and_two_exchanges_for_each_chunk() -> None:
    optimizer = ready(cut_anywhere())
    with CommDebugMode() as comms:
        optimizer.step()
    chunks = len(next(iter(optimizer._plans.values())).chunks)
    assert 1 < chunks <= 4 < len(SHAPES)
    counts = {str(op): count for op, count in comms.get_comm_counts().items()}
    assert counts == {"c10d.alltoall_base_": 2 * chunks, "c10d.allreduce_": 1}


@on_ranks(3)
def test_every_matrix_is_computed_once_on_one_rank() -> None:
    optimizer = ready(cut_anywhere())
    with recorded() as events:
        optimizer.step()
    computed: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(computed, [shape for kind, shape in events if kind == "compute"])
    stacked = [shape[1:] for shape in STACKS for _ in range(shape[0])]
    assert sorted(shape for shapes in computed for shape in shapes) == sorted(MATRICES + stacked)


@on_ranks(2)
def test_experts_that_are_whole_on_a_rank_are_not_exchanged() -> None:
    # However unequal that makes the ranks' work.
    experts = [6, 2]
    (stack,) = random_tensors([(8, 8, 12)], seed=0)
    optimizer = ready([shard(stack, RaggedShard((0,), experts))])
    with recorded() as events, CommDebugMode() as comms:
        optimizer.step()
    assert [kind for kind, _ in events] == ["compute"] * experts[dist.get_rank()]
    assert comms.get_total_counts() == 1  # the comparison of gradients


@on_ranks(2)
def test_the_next_chunk_is_on_its_way_before_one_is_computed() -> None:
    layouts = [RaggedShard((0,), units) for units in [(6, 6)] * 8 + [(12, 0), (0, 12)]]
    fulls = random_tensors([(12, 12)] * len(layouts), seed=0)
    optimizer = ready([shard(*each) for each in zip(fulls, layouts, strict=True)], exchange_bytes=2 * 144)
    with recorded() as events:
        optimizer.step()
    order = "".join({"launch": "L", "wait": "W", "compute": "c"}[kind] for kind, _ in events)
    # 4 chunks of one matrix for each rank. Out 0, and what is whole here; out 1, chunk 0, back 0; twice out k + 1,
    # chunk k, back k, apply k - 1; chunk 3, back 3, apply 2; apply 3.
    assert order == "Lc" + "LWcL" + 2 * "LWcLW" + "WcLW" + "W"


@on_ranks(3)
def test_all_ranks_launch_and_wait_in_one_order() -> None:
    optimizer = ready(cut_anywhere())
    with recorded() as events:
        optimizer.step()
    orders: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(orders, [kind for kind, _ in events if kind != "compute"])
    assert orders[0] == orders[1] == orders[2]


@on_ranks(2)
def test_torch_optim_muon_gathers_each_dtensor_fifteen_times() -> None:
    full, grad = random_tensors([(16, 40), (16, 40)], seed=0)
    param = nn.Parameter(distribute_tensor(full, world_mesh(), [Shard(0)]))
    param.grad = distribute_tensor(grad, world_mesh(), [Shard(0)])
    optimizer = torch.optim.Muon([param])
    with CommDebugMode() as comms:
        optimizer.step()
    gathers = sum(count for op, count in comms.get_comm_counts().items() if "all_gather" in str(op))
    assert gathers == 15


@on_ranks(2)
def test_a_step_asks_for_no_other_ranks_places() -> None:
    """Of thousands of ranks, for each of thousands of matrices: that took longer than the step."""
    optimizer = ready(cut_anywhere())
    with mock.patch.object(RaggedShard, "intervals", side_effect=AssertionError):
        optimizer.step()


@on_ranks(2)
def test_where_two_sets_of_parameters_have_gradients_in_turn_each_is_planned_once() -> None:
    optimizer = ready(cut_anywhere())
    params = optimizer.param_groups[0]["params"]
    kept = params[0].grad
    with mock.patch.object(muon_module, "plan_matrices", wraps=muon_module.plan_matrices) as planned:
        for step in range(4):
            params[0].grad = kept if step % 2 else None
            optimizer.step()
    assert planned.call_count == 2
