"""Operations on lists some of whose tensors are still on their way."""

import pytest
import torch
from cases import shard
from ranks import on_ranks

from vescale_compile.ragged.arriving import ArrivingDTensor
from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard, RaggedShardError

SHAPE = (5, 3)


class Arrival:
    """Says, when it is waited for, what was already done."""

    def __init__(self, number: int, watched: list[RaggedDTensor]) -> None:
        self.number, self.watched = number, watched
        self.over = False
        self.seen: list[bool] = []

    def wait(self) -> None:
        if not self.over:
            self.seen = [bool(tensor.to_local().abs().sum() > 0) for tensor in self.watched]
        self.over = True


def sharded(value: float) -> RaggedDTensor:
    return shard(torch.full(SHAPE, value), RaggedShard((0,), (3, 2)))


def arriving(tensor: RaggedDTensor, arrival: Arrival) -> RaggedDTensor:
    return tensor.with_arriving(tensor.to_local(), arrival)


def updated_by(step) -> tuple[list[Arrival], list[RaggedDTensor]]:
    """Of four parameters, those in the middle have gradients on their way: the third's comes before the second's."""
    params = [sharded(0.0) for _ in range(4)]
    grads = [sharded(1.0) for _ in params]
    arrivals = [Arrival(7, params), Arrival(3, params)]
    for index, arrival in zip((1, 2), arrivals, strict=True):
        grads[index] = arriving(grads[index], arrival)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    step(params)
    return arrivals, params


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@on_ranks(2)
def test_a_fused_step_begins_with_the_gradients_that_are_there(make):
    (second, third), params = updated_by(lambda params: make(params, lr=0.1, fused=True).step())
    assert third.seen == [True, False, False, True]
    assert second.seen == [True, False, True, True]
    assert all(torch.equal(param.full_tensor(), params[0].full_tensor()) for param in params)


@on_ranks(2)
def test_so_does_a_foreach_operation_with_a_number_for_each_tensor():
    def step(params: list[RaggedDTensor]) -> None:
        grads = [param.grad for param in params]
        torch._foreach_addcmul_(params, grads, grads, [1.0, 2.0, 3.0, 4.0])

    arrivals, params = updated_by(step)
    assert all(arrival.over for arrival in arrivals)
    assert [param.full_tensor()[0, 0].item() for param in params] == [1, 2, 3, 4]


@on_ranks(2)
def test_new_tensors_made_of_a_list_keep_its_order():
    def step(params: list[RaggedDTensor]) -> None:
        totals = torch._foreach_mul([param.grad for param in params], [1.0, 2.0, 3.0, 4.0])
        for param, total in zip(params, totals, strict=True):
            param.copy_(total)

    _, params = updated_by(step)
    assert [param.full_tensor()[0, 0].item() for param in params] == [1, 2, 3, 4]


@on_ranks(2)
def test_detaching_waits_for_nothing_and_reading_does():
    arrival = Arrival(0, [])
    tensor = arriving(sharded(0.0), arrival).detach()
    assert isinstance(tensor, ArrivingDTensor) and not arrival.over
    assert tensor.shape == SHAPE and not arrival.over
    tensor.to_local()
    assert arrival.over


@pytest.mark.parametrize("form", ["fused", "foreach"])
@on_ranks(2)
def test_lists_may_hold_plain_tensors_too(form):
    params = [sharded(0.0), torch.zeros(SHAPE)]
    params[0].grad, params[1].grad = arriving(sharded(1.0), Arrival(0, [])), torch.ones(SHAPE)
    torch.optim.AdamW(params, lr=0.1, **{form: True}).step()
    assert torch.equal(params[0].full_tensor(), params[1])


@on_ranks(2)
def test_what_does_not_fit_is_refused_before_anything_is_written():
    params = [sharded(0.0), sharded(0.0)]
    elsewhere = shard(torch.ones(SHAPE), RaggedShard((0,), (2, 3)))
    arrival = Arrival(0, [])
    with pytest.raises(RaggedShardError):
        torch._foreach_add_(params, [sharded(1.0), arriving(elsewhere, arrival)])
    assert params[0].full_tensor().sum() == 0
    assert not arrival.over


@on_ranks(2)
def test_views_wait_for_the_elements():
    for view in (lambda t: t[0:2], lambda t: t[1], lambda t: t.view(SHAPE), lambda t: t.expand_as(t)):
        arrival = Arrival(0, [])
        viewed, whole = view(arriving(sharded(1.0), arrival)), view(sharded(1.0))
        assert viewed.to_local().sum() == viewed.to_local().numel() == whole.to_local().numel()
        assert arrival.over


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@on_ranks(2)
def test_a_compiled_optimizer_takes_them(options):
    torch._dynamo.reset()
    param = sharded(0.0)
    optimizer = torch.optim.AdamW([param], lr=0.1, **options)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for _ in range(2):
        param.grad = arriving(sharded(1.0), Arrival(0, []))
        step()
    assert torch.allclose(param.full_tensor(), torch.full(SHAPE, -0.2), atol=0.01)
