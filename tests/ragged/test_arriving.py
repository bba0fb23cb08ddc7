"""Operations on lists some of whose tensors are still on their way."""

import pytest
import torch
from cases import shard
from ranks import on_ranks

from vescale_compile.ragged.arriving import ArrivingDTensor, arriving
from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard

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
