"""Norms and full reductions equal the whole tensor's, on every rank, for one all-reduce."""

import math

import pytest
import torch
from cases import shard, uneven, world_mesh
from ranks import on_ranks
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_, get_total_norm

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard, RaggedShardError

ORDERS = [2, 1, 3, 0.5, 0, -1, -2, math.inf, -math.inf]
SHAPES = [(7, 3), (1, 5), (4,), ()]


def place(full: torch.Tensor) -> torch.Tensor:
    """Empty shards on some ranks, for every shape."""
    ones = torch.distributed.get_world_size() - 1
    return shard(full, uneven(7) if full.ndim == 2 and len(full) == 7 else RaggedShard((), (0,) * ones + (1,)))


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_vector_norms_of_every_order(dtype: torch.dtype) -> None:
    for order in ORDERS:
        for full in tensors(dtype):
            norm = torch.linalg.vector_norm(place(full), order)
            assert type(norm) is torch.Tensor
            torch.testing.assert_close(norm, torch.linalg.vector_norm(full, order))


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dot_of_flattened_tensors(dtype: torch.dtype) -> None:
    """As Prodigy and D-Adaptation have it."""
    for full in tensors(dtype):
        ragged, other = place(full), place(full.cos())
        found = torch.dot(ragged.flatten(), other.flatten())
        torch.testing.assert_close(found, torch.dot(full.flatten(), full.cos().flatten()))
        for mixed in ((ragged.flatten(), full.flatten()), (full.flatten(), ragged.flatten())):
            with pytest.raises(RaggedShardError, match="is not cut alike"):
                torch.dot(*mixed)
    for unfit in ((ragged.flatten(), ragged.flatten().to(torch.int32)), (place(tensors()[0]), place(tensors()[0]))):
        with pytest.raises(RaggedShardError, match="one dimension and the same dtype"):
            torch.dot(*unfit)


@on_ranks(3)
def test_vector_norm_options() -> None:
    full = tensors()[0]
    keepdim = torch.linalg.vector_norm(place(full), dim=(0, -1), keepdim=True)
    torch.testing.assert_close(keepdim, torch.linalg.vector_norm(full, keepdim=True))
    double = torch.linalg.vector_norm(place(full), dtype=torch.float64)
    torch.testing.assert_close(double, torch.linalg.vector_norm(full, dtype=torch.float64))
    torch.testing.assert_close(place(full).norm(), full.norm())
    with pytest.raises(RaggedShardError, match="dimensions"):
        torch.linalg.vector_norm(place(full), dim=1)


@on_ranks(2)
def test_vector_norms_over_the_dimensions_that_have_a_length() -> None:
    for shape, dim in (((), 0), ((), -1), ((1, 5), 1), ((5, 1), (0,))):
        full = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
        placed = place(full)
        for keepdim in (False, True):
            expected = torch.linalg.vector_norm(full, dim=dim, keepdim=keepdim)
            assert torch.equal(torch.linalg.vector_norm(placed, dim=dim, keepdim=keepdim), expected)
    with pytest.raises(IndexError):
        torch.linalg.vector_norm(placed, dim=(0, 3))


@on_ranks(2, 4)
def test_foreach_norm_of_a_mixed_list_is_one_all_reduce() -> None:
    full = [*tensors(), *tensors(), tensors()[0]]
    mesh = world_mesh()
    placed = [place(t) for t in tensors()] + tensors()
    placed.append(distribute_tensor(tensors()[0], mesh, [Shard(0)]))
    placed.append(distribute_tensor(tensors()[0], mesh, [Replicate()]))
    for order in ORDERS:
        with CommDebugMode() as comms:
            norms = torch._foreach_norm(placed, order)
        assert dict(comms.get_comm_counts()) == {torch.ops.c10d_functional.all_reduce: 1}
        for norm, tensor in zip(norms, [*full, full[0]][: len(norms)], strict=True):
            assert type(norm) is torch.Tensor
            torch.testing.assert_close(norm, torch.linalg.vector_norm(tensor, order))


@on_ranks(3)
def test_nan_and_inf_show_in_every_norm() -> None:
    for bad in (math.nan, math.inf):
        full = tensors()[0]
        full[3, 1] = bad
        for order in (2, 1, math.inf, -math.inf):
            norm = torch.linalg.vector_norm(place(full), order)
            torch.testing.assert_close(norm, torch.linalg.vector_norm(full, order), equal_nan=True)


@on_ranks(2, 3)
@pytest.mark.parametrize("order", [2, 1, math.inf])
def test_clip_grad_norm(order: float) -> None:
    def clipped(placements: list, foreach: bool | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        params = [nn.Parameter(p(t)) for p, t in zip(placements, tensors(), strict=True)]
        for param, p, grad in zip(params, placements, tensors(), strict=True):
            param.grad = p(10 * grad)
        norm = clip_grad_norm_(params, 0.5, order, foreach=foreach)
        grads = [param.grad for param in params]
        return norm, [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]

    plain = torch.clone
    sharded = lambda t: distribute_tensor(t, world_mesh(), [Shard(0)])  # noqa: E731
    expected_norm, expected = clipped([plain] * 4, foreach=None)
    cases = [([place] * 4, None), ([place] * 4, True), ([place, plain, place, place], None)]
    cases += [([sharded, place, plain, place], True), ([sharded, place, place, place], False)]
    for placements, foreach in cases:
        norm, grads = clipped(placements, foreach)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(norm, expected_norm)
        for grad, reference in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, reference)


@on_ranks(2)
def test_gradients_still_being_reduced_are_waited_for() -> None:
    full = tensors()[0]
    param = nn.Parameter(place(full))
    reducing = all_reduce(torch.ones(50), "avg", torch.distributed.group.WORLD)
    assert isinstance(reducing, AsyncCollectiveTensor)
    param.grad = param.detach().with_local(reducing[: param.to_local().numel()])
    torch.testing.assert_close(clip_grad_norm_([param], 1e9), torch.tensor(21**0.5))
    torch.optim.SGD([param], lr=1.0, fused=True).step()
    torch.testing.assert_close(param.detach().full_tensor(), full - 1)


@on_ranks(3)
def test_total_norm_reports_non_finite_gradients() -> None:
    with pytest.raises(RuntimeError, match="non-finite"):
        get_total_norm([place(tensors()[0] / 0)], math.inf, error_if_nonfinite=True)


@on_ranks(2, 3)
def test_norms_of_what_is_placed_elsewhere_are_refused() -> None:
    size = torch.distributed.get_world_size()
    two_dimensional = init_device_mesh("cpu", (1, size))
    other = distribute_tensor(tensors()[0], two_dimensional, [Shard(0), Shard(1)])
    partial = DTensor.from_local(tensors()[0], world_mesh(), [Partial()])
    for tensor in (other, partial):
        with pytest.raises(RaggedShardError):
            torch._foreach_norm([place(tensors()[0]), tensor])


@on_ranks(4)
def test_norms_of_what_has_replicas_and_of_what_has_none_are_refused_together() -> None:
    """Though both are sharded over the same ranks: experts are, beside hybrid sharding."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "same"))
    replicated, alone = (
        RaggedDTensor.from_local(torch.ones(1), mesh["same"], [RaggedShard((0,), (1, 1))], shape=(2,), whole=whole)
        for whole in (mesh, None)
    )
    with pytest.raises(RaggedShardError, match="tensors that other ranks have others of"):
        torch._foreach_norm([replicated, alone])
    torch.testing.assert_close(torch._foreach_norm([replicated]), [torch.tensor(2.0).sqrt()])


@on_ranks(3)
def test_full_reductions() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        for full in (torch.arange(-3, 18).reshape(7, 3).to(dtype), torch.ones(7, 3, dtype=dtype)):
            ragged = place(full)
            for name in ("any", "all", "sum", *(["mean"] if dtype.is_floating_point else [])):
                result = getattr(ragged, name)()
                assert type(result) is torch.Tensor
                torch.testing.assert_close(result, getattr(full, name)())
            torch.testing.assert_close(ragged.sum(dtype=torch.float64), full.sum(dtype=torch.float64))
    assert not place(torch.zeros(7, 3)).isfinite().logical_not().any()


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_the_largest_and_the_smallest_element(dtype: torch.dtype) -> None:
    for full in (each.mul(9).to(dtype) for each in tensors()):
        ragged = place(full)
        for name in ("max", "min"):
            found = getattr(ragged, name)()
            assert type(found) is torch.Tensor
            assert torch.equal(found, getattr(full, name)())
        if dtype.is_floating_point and full.ndim:
            full[-1] = math.nan
            assert place(full).max().isnan() and place(full).min().isnan()


@on_ranks(2)
def test_complex_numbers_have_no_largest_and_no_smallest_element() -> None:
    ragged = place(tensors(torch.complex64)[0])
    for reduce in (ragged.max, ragged.min):
        with pytest.raises(RaggedShardError, match="complex numbers have no order"):
            reduce()


@on_ranks(2)
def test_reductions_of_some_dimensions_are_refused() -> None:
    ragged = place(tensors()[0])
    for reduce in (ragged.sum, ragged.any, ragged.all, ragged.mean):
        with pytest.raises(RaggedShardError):
            reduce(dim=1)


@on_ranks(3)
def test_a_gradient_flows_through_the_norm() -> None:
    full = tensors()[0].requires_grad_()
    ragged = place(tensors()[0]).requires_grad_()
    torch.linalg.vector_norm(full).square().backward()
    torch.linalg.vector_norm(ragged).square().backward()
    torch.testing.assert_close(ragged.grad.full_tensor(), full.grad)


@on_ranks(2)
def test_a_differentiable_sum_is_refused() -> None:
    ragged = place(tensors()[0]).requires_grad_()
    with pytest.raises(RaggedShardError, match="gradient"):
        ragged.sum()
    ragged.detach().sum()


@on_ranks(3)
def test_grad_scaler_skips_the_step_on_every_rank_if_one_gradient_is_infinite() -> None:
    for bad in (1.0, math.inf):
        param = nn.Parameter(place(torch.zeros(7, 3)))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        grad = torch.full((7, 3), 8.0)
        grad[6, 2] *= bad
        param.grad = place(grad)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if bad == 1.0 else 4.0)
        expected = torch.full((7, 3), -1.0 if bad == 1.0 else 0.0)
        torch.testing.assert_close(param.detach().full_tensor(), expected)
