"""Gradients flow through to_local, from_local, full_tensor and redistribute as they do through DTensor's."""

import pytest
import torch
import torch.distributed as dist
from cases import numbered, shard, world_mesh
from ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.ragged.redistribute import distribute_ragged, to_ragged

LAYOUT = RaggedShard((0,), (1, 3))
OTHER = RaggedShard((0, 1), (7, 5))
FULL = numbered((4, 3))
WEIGHT = FULL.flip(0) + 1


def leaf() -> RaggedDTensor:
    return nn.Parameter(shard(FULL, LAYOUT))


def assert_grad(param: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(param.grad) is RaggedDTensor and param.grad.placements == param.placements
    assert torch.equal(param.grad.full_tensor(), expected)


@on_ranks(2)
def test_full_tensor_takes_a_replicated_gradient() -> None:
    param = leaf()
    (param.full_tensor() * WEIGHT).sum().backward()
    assert_grad(param, WEIGHT)


@on_ranks(2)
def test_full_tensor_sums_a_partial_gradient() -> None:
    param = leaf()
    full = param.full_tensor(grad_placements=[Partial()])
    (full * WEIGHT * (dist.get_rank() + 1)).sum().backward()
    assert_grad(param, 3 * WEIGHT)


@on_ranks(2)
def test_to_local_takes_the_gradient_of_this_rank() -> None:
    param = leaf()
    local = param.to_local()
    assert local.data_ptr() == param._local_tensor.data_ptr()
    (local * shard(WEIGHT, LAYOUT).to_local()).sum().backward()
    assert_grad(param, WEIGHT)


@on_ranks(2)
def test_from_local_gives_the_gradient_to_the_local_tensor() -> None:
    local = shard(FULL, LAYOUT).to_local().requires_grad_()
    ragged = RaggedDTensor.from_local(local, world_mesh(), [LAYOUT], shape=(4, 3))
    (ragged.full_tensor() * WEIGHT).sum().backward()
    assert torch.equal(local.grad, shard(WEIGHT, LAYOUT).to_local())


@on_ranks(2)
def test_from_local_makes_leaves() -> None:
    local = shard(FULL, LAYOUT).to_local()
    ragged = RaggedDTensor.from_local(local, world_mesh(), [LAYOUT], shape=(4, 3), requires_grad=True)
    assert ragged.is_leaf and ragged.requires_grad
    assert ragged.to_local().data_ptr() == local.data_ptr()


@on_ranks(2)
def test_redistribution_returns_the_gradient_to_where_it_came_from() -> None:
    for target in (OTHER, Replicate(), Shard(0), Shard(1)):
        param = leaf()
        moved = param.redistribute(placements=[target])
        (moved * 2).redistribute(placements=[Replicate()]).to_local().mul(WEIGHT).sum().backward()
        assert_grad(param, 2 * WEIGHT)


@on_ranks(2)
def test_to_ragged_returns_gradients_to_plain_dtensors() -> None:
    for source in (Replicate(), Shard(0), Shard(1), Partial()):
        local = FULL.clone().requires_grad_()
        dtensor = DTensor.from_local(local, world_mesh(), [source])
        if isinstance(source, Shard):
            dtensor = DTensor.from_local(local, world_mesh(), [Replicate()])
            dtensor = dtensor.redistribute(placements=[source])
        (to_ragged(dtensor, LAYOUT).full_tensor() * WEIGHT).sum().backward()
        assert torch.equal(local.grad, WEIGHT)


@on_ranks(2)
def test_distribute_ragged_is_differentiable() -> None:
    full = FULL.clone().requires_grad_()
    (distribute_ragged(full, world_mesh(), LAYOUT).full_tensor() * WEIGHT).sum().backward()
    assert torch.equal(full.grad, WEIGHT)


@on_ranks(2)
def test_elementwise_operations_are_differentiable() -> None:
    param = leaf()
    ((param * 2).exp().clamp(max=50) / 2).full_tensor().backward(WEIGHT)
    reference = FULL.clone().requires_grad_()
    ((reference * 2).exp().clamp(max=50) / 2).backward(WEIGHT)
    assert_grad(param, reference.grad)


@pytest.mark.parametrize("shape", [(12,), (2, 6), (4, 1, 3)])
@on_ranks(2)
def test_views_in_other_shapes_are_differentiable(shape: tuple[int, ...]) -> None:
    param = leaf()
    param.view(shape).exp().full_tensor().backward(WEIGHT.view(shape))
    assert_grad(param, WEIGHT * FULL.exp())


@on_ranks(2)
def test_squeezing_is_differentiable() -> None:
    param = leaf()
    param[None].squeeze().unsqueeze(1).squeeze(1).exp().full_tensor().backward(WEIGHT)
    assert_grad(param, WEIGHT * FULL.exp())


@on_ranks(2)
def test_elementwise_operations_compile() -> None:
    param = leaf()
    doubled = torch.compile(lambda p: (p * 2).sin(), backend="aot_eager", fullgraph=True)(param)
    assert type(doubled) is RaggedDTensor and torch.equal(doubled.full_tensor(), (FULL * 2).sin())
    doubled.full_tensor().backward(WEIGHT)
    assert_grad(param, (WEIGHT * (FULL * 2).cos()) * 2)


class _FromOutside(torch.autograd.Function):
    """As the compiled backward does: parameter gradients are views of one flat buffer."""

    @staticmethod
    def forward(ctx, buffer: torch.Tensor, *params: RaggedDTensor) -> torch.Tensor:
        ctx.buffer, ctx.params = buffer, params
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:
        grads, start = [], 0
        for param in ctx.params:
            stop = start + param._local_tensor.numel()
            grads.append(param.with_local(ctx.buffer[start:stop]))
            start = stop
        return None, *grads


@on_ranks(2)
def test_the_first_gradient_is_taken_without_a_copy() -> None:
    params = [leaf(), leaf()]
    numel = params[0]._local_tensor.numel()
    buffer = torch.arange(2.0 * numel)
    _FromOutside.apply(buffer, *params).requires_grad_().backward()
    for i, param in enumerate(params):
        assert type(param.grad) is RaggedDTensor
        assert param.grad._local_tensor.data_ptr() == buffer[i * numel :].data_ptr()


@on_ranks(2)
def test_gradients_accumulate() -> None:
    params = [leaf(), leaf()]
    for _ in range(3):
        buffer = torch.ones(2 * params[0]._local_tensor.numel())
        _FromOutside.apply(buffer, *params).requires_grad_().backward()
    for param in params:
        assert_grad(param, torch.full((4, 3), 3.0))


@on_ranks(2)
def test_hooks_see_ragged_gradients() -> None:
    param, seen = leaf(), []
    param.register_hook(lambda grad: seen.append(type(grad)) or grad * 2)
    param.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    param.full_tensor().backward(WEIGHT)
    assert seen == [RaggedDTensor, RaggedDTensor]
    assert_grad(param, 2 * WEIGHT)
