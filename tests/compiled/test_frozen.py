"""Units of which some parameters are frozen, for a time: gradients are right on all ranks, and few questions asked."""

from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_used import Branches, average_what_any_rank_has, check, check_branches_of_their_own, questions_of

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`


@pytest.mark.parametrize("accumulates", [False, True])
@on_ranks(2)
def test_ranks_ask_each_other_nothing_where_a_parameter_was_frozen_or_is_no_more(accumulates):
    torch._dynamo.reset()
    model, call = models.sharded(lambda: Branches(12))
    x = torch.randn(4, 12)

    def step() -> None:
        if accumulates:
            with vc.no_sync(model):
                call(x, 0, 1, 2).backward()
        call(x, 0, 1, 2).backward()

    step()
    for trained in (False, True):
        model.parts[2].requires_grad_(trained)
        assert questions_of(step) == accumulates  # once: what accumulated may be of before
        assert questions_of(step) == 0


@on_ranks(2)
def test_uncompiled_no_rank_waits_for_an_answer_on_what_is_frozen():
    model, call = models.sharded(lambda: Branches(8), compile=None)
    model.parts[2].requires_grad_(False)
    loss = call(torch.randn(4, 8), 0, 1, 2)
    with mock.patch.object(torch.Tensor, "tolist", side_effect=AssertionError):
        loss.backward()


@pytest.mark.parametrize("frozen", [(False, True), (True, False), (True, True)])
@on_ranks(2)
def test_branches_are_told_apart_whatever_is_frozen(frozen):
    """``frozen`` where the graphs are compiled, and where each rank runs another of them."""
    torch._dynamo.reset()
    model, call = models.sharded(lambda: Branches(13))
    reference = models.build(lambda: Branches(13))
    x = torch.randn(4, 13)
    for first in dict.fromkeys(frozen):
        model.parts[0].requires_grad_(not first)
        for index in (1, 2):
            call(x, 0, index).backward()
    model.zero_grad()
    for each in (model, reference):
        each.parts[0].requires_grad_(not frozen[-1])
    check_branches_of_their_own(model, call, reference, x)


@on_ranks(2)
def test_branches_are_told_apart_where_a_parameter_is_frozen_before_the_backward():
    torch._dynamo.reset()
    model, call = models.sharded(lambda: Branches(14))
    reference = models.build(lambda: Branches(14))
    x = torch.randn(4, 14)
    for index in (1, 2):
        call(x, 0, index).backward()
    model.zero_grad()
    own = 1 + dist.get_rank()
    losses = call(x, 0, own), reference(x, 0, own)
    for each in (model, reference):
        each.parts[0].requires_grad_(False)
    for loss in losses:
        loss.backward()
    average_what_any_rank_has(reference)
    check(model, reference)


@on_ranks(2)
def test_what_one_rank_accumulated_before_it_was_frozen_comes_to_all():
    torch._dynamo.reset()
    model, call = models.sharded(lambda: Branches(15))
    reference = models.build(lambda: Branches(15))
    x = torch.randn(4, 15)
    with vc.no_sync(model):
        loss = call(x, 0, 1)
        if dist.get_rank() == 0:  # the other leaves this batch out
            loss.backward()
            reference(x, 0, 1).backward()
    model.parts[1].requires_grad_(False)
    call(x, 0, 1).backward()
    whole = reference.parts[1].requires_grad_(False).grad
    reference(x, 0, 1).backward()
    assert reference.parts[1].grad is whole
    average_what_any_rank_has(reference)
    check(model, reference)
