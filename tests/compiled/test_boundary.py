"""The first gather of the backward is launched while the forward ends, whatever comes between the two.

The unit that is read last in the forward and first in the backward, the root, is kept: the first gather is another's.
"""

import functools

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc
from vescale_compile.passes.context import Part
from vescale_compile.runtime import crossing
from vescale_compile.schedule.early import IN_FLIGHT

pytestmark = pytest.mark.slow  # left out of `make test-fast`

OPTIONS = {"lowering": "eager", "cluster": models.SLOW_WIRE}
UNITS = 3
IN_A_STEP = 3 * UNITS - 1
"""messages to the other rank: each unit is gathered twice, but for one, and reduced once"""
CARRY, TAKE = "carry all_gather of layers.1", "take all_gather of layers.1"


def explained(reshard: bool = True, **options):
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(models.Uneven), reshard_after_forward=reshard)
    (graph,) = vc.explain(model, *models.batches(1, 11)[0], options={**OPTIONS, **options}).graphs
    return graph


@pytest.fixture(scope="module")
def usual():
    """The report of a model of uneven sizes that two ranks train."""
    with fake_world(2):
        return explained()


def compiled(seed: int = 0, **shard_options) -> tuple[torch.nn.Module, torch.nn.Module]:
    crossing.forget_carried()
    model = vc.fully_shard(models.build(models.Uneven, seed), **shard_options)
    return model, torch.compile(model, backend="vescale", options=OPTIONS)


def events(run) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    ran = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [event.name for event in ran if event.name.startswith(("vescale::", "c10d::send"))]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.grad.full_tensor() for param in model.parameters()]


def reference(losses_of) -> list[torch.Tensor]:
    """Gradients of the unsharded model, averaged over the ranks."""
    model = models.build(models.Uneven)
    losses_of(model).backward()
    models.average_gradients(model)
    return [param.grad for param in model.parameters()]


@functools.cache
def of_first_batch() -> list[torch.Tensor]:
    """The reference of each rank's first batch."""
    tokens, labels = models.batches(1, 11)[0]
    return reference(lambda call: call(tokens, labels))


def test_it_is_launched_when_the_forwards_own_gathers_are_over_and_taken_where_it_is_read(usual):
    assert usual.parts[Part.FORWARD].schedule[-1] == CARRY
    backward = usual.parts[Part.BACKWARD].schedule
    assert TAKE in backward and "launch all_gather of layers.1" not in backward
    ahead = backward[: backward.index(TAKE)]  # launches of those that come next, with it as many as may be in flight
    assert len(ahead) < IN_FLIGHT and all(event.startswith("launch") for event in ahead)


def test_it_is_no_gather_more(usual):
    names = {unit.name for unit in usual.units}
    for part, gathered in ((Part.FORWARD, names), (Part.BACKWARD, names - {"(root)"})):
        found = [entry.unit for entry in usual.parts[part].entries if entry.kind.value == "all-gather"]
        assert sorted(found) == sorted(gathered)


def test_its_slot_holds_nothing_else(usual):
    slots = [slot for part in usual.parts.values() for slot in part.slots if slot.carried]
    assert [[tenant.what for tenant in slot.tenants] for slot in slots] == [["gathered parameters of layers.1"]] * 2


def test_where_the_backward_gathers_nothing_again_nothing_is_carried():
    with fake_world(2):
        graph = explained(reshard=False)
    assert not any(event.startswith(("carry", "take")) for part in graph.parts.values() for event in part.schedule)


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=str)
@on_ranks(2)
def test_a_program_whose_backward_reads_no_parameter_decides_for_itself(order):
    torch.manual_seed(0)
    model = vc.fully_shard(torch.nn.Linear(6, 6 + order[0], bias=False))
    call = torch.compile(model, backend="vescale", options=OPTIONS)
    weight = model.weight.full_tensor()
    for wanted in order:  # the gradient of the input takes the weight, that of the weight does not
        x = torch.ones(3, 6, requires_grad=wanted)
        call(x).sum().backward()
        if wanted:
            torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 6))


def test_where_the_budget_has_no_room_for_it_nothing_is_carried(usual):
    with fake_world(2):
        tight = explained(memory_budget=usual.peak_bytes - 1900)
    assert tight.peak_bytes <= usual.peak_bytes - 1900
    assert CARRY not in tight.parts[Part.FORWARD].schedule


@pytest.mark.parametrize(("quantizer", "suffix"), [(None, ""), (vc.BlockInt8(8), "_quantized")], ids=repr)
@on_ranks(2)
def test_each_step_carries_one_gather_and_waits_for_it_in_the_backward(quantizer, suffix):
    _, call = compiled(quantize=quantizer)
    data = models.batches(3, 11)
    call(*data[0]).backward()
    for batch in data[1:]:
        ran = events(lambda batch=batch: call(*batch).backward())
        assert ran.count(f"vescale::carry_all_gather{suffix}") == ran.count(f"vescale::take_all_gather{suffix}") == 1
        assert ran.count("c10d::send") == IN_A_STEP


@on_ranks(2)
def test_codes_that_were_carried_for_another_forward_are_gathered_again():
    """After a forward whose loss was dropped, what it carried is of the old values."""
    model, call = compiled(quantize=vc.BlockInt8(8))
    data = models.batches(2, 11)
    call(*data[0])
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    call(*data[1]).backward()
    found = gradients(model)
    model.zero_grad()
    crossing.forget_carried()
    call(*data[1]).backward()
    assert all(torch.equal(*pair) for pair in zip(found, gradients(model), strict=True))


@on_ranks(2)
def test_a_profiler_may_end_between_the_forward_and_its_backward():
    model, call = compiled()
    data = models.batches(1, 11)[0]
    expected = of_first_batch()
    for _ in range(3):
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]):
            loss = call(*data)
        loss.backward()
        assert all(map(torch.equal, gradients(model), expected))


@on_ranks(2)
def test_two_forwards_before_their_backwards():
    data = models.batches(2, 11)
    model, call = compiled()
    for batch in data:
        call(*batch).backward()
    expected = gradients(model)
    model, call = compiled()
    for _ in range(2):
        model.zero_grad()
        (call(*data[0]) + call(*data[1])).backward()
        assert all(map(torch.equal, gradients(model), expected))


@on_ranks(2)
def test_a_second_forward_of_the_same_parameters_gathers_nothing_for_the_backward():
    data = models.batches(1, 11)[0]
    _, call = compiled()
    call(*data)
    assert events(lambda: call(*data)).count("c10d::send") == UNITS


@on_ranks(2)
def test_what_models_of_two_dtypes_carry_lies_apart():
    """A generator's forward, a discriminator's, and their backwards the other way round."""
    policies = (vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16), vc.MixedPrecisionPolicy())
    both = [vc.fully_shard(models.build(models.Uneven), mp_policy=policy) for policy in policies]
    calls = [torch.compile(model, backend="vescale", options=OPTIONS) for model in both]
    batch = models.batches(1, 11)[0]

    def taken() -> list[torch.Tensor]:
        found = [param.grad.full_tensor() for model in both for param in model.parameters()]
        for model in both:
            model.zero_grad()
        return found

    for _ in range(3):
        for call in calls:
            call(*batch).backward()
        one_after_the_other = taken()
        for loss in [call(*batch) for call in calls][::-1]:
            loss.backward()
        for ours, expected in zip(taken(), one_after_the_other, strict=True):
            assert torch.equal(ours, expected)


@on_ranks(2)
def test_nothing_is_carried_while_forwards_are_not_followed_by_their_backwards():
    data = models.batches(1, 11)[0]
    _, first = compiled()
    second = torch.compile(vc.fully_shard(models.build(models.Uneven, seed=1)), backend="vescale", options=OPTIONS)

    def together() -> None:
        (first(*data) + second(*data)).backward()

    together()
    assert events(together).count("c10d::send") == 2 * IN_A_STEP
    for _ in range(2):
        first(*data).backward()
    assert events(lambda: first(*data)).count("c10d::send") == UNITS + 1


@on_ranks(2)
def test_nothing_is_carried_where_hooks_give_the_backward_other_tensors_than_the_forward_had():
    data = models.batches(1, 11)[0]
    _, call = compiled()

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            call(*data).backward()

    for _ in range(3):
        step()
    assert events(step).count("c10d::send") == IN_A_STEP


@on_ranks(2)
def test_a_forward_whose_loss_is_dropped():
    data = models.batches(2, 11)
    model, call = compiled()
    call(*data[0])
    call(*data[1]).backward()
    assert all(map(torch.equal, gradients(model), reference(lambda call: call(*data[1]))))


@pytest.mark.parametrize("alias", ["detach", "slice"])
@on_ranks(2)
def test_a_write_that_the_parameter_does_not_count_is_seen(alias):
    """After a forward whose loss was dropped, what it carried is of the old values."""
    data = models.batches(1, 11)[0]
    model, call = compiled()
    call(*data)
    with torch.no_grad():
        for param in model.parameters():
            (param.detach() if alias == "detach" else param[0:]).mul_(2)

    def doubled(unsharded):
        with torch.no_grad():
            for param in unsharded.parameters():
                param.mul_(2)
        return unsharded(*data)

    call(*data).backward()
    assert all(map(torch.equal, gradients(model), reference(doubled)))


@on_ranks(2)
def test_one_rank_alone_may_write():
    data = models.batches(1, 11)[0]
    model, call = compiled()
    call(*data)
    if dist.get_rank() == 0:
        for param in model.parameters():
            param.to_local().detach().mul_(1)
    call(*data).backward()
    assert all(map(torch.equal, gradients(model), of_first_batch()))


@on_ranks(2)
def test_a_rank_may_train_a_model_of_its_own_between_a_forward_and_its_backward():
    data = models.batches(1, 11)[0]
    model, call = compiled()
    alone = DeviceMesh("cpu", [0])
    second = vc.fully_shard(models.build(models.Uneven, seed=1), mesh=alone) if dist.get_rank() == 0 else None
    call_second = torch.compile(second, backend="vescale", options=OPTIONS) if second is not None else None
    expected = of_first_batch()
    for _ in range(3):
        model.zero_grad()
        loss = call(*data)
        if call_second is not None:
            call_second(*data).backward()
        loss.backward()
        assert all(map(torch.equal, gradients(model), expected))


@on_ranks(2)
def test_a_backward_that_runs_twice():
    data = models.batches(1, 11)[0]
    model, call = compiled()
    with torch._functorch.config.patch(donated_buffer=False):  # else PyTorch refuses retain_graph=True
        loss = call(*data)
        loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert all(map(torch.equal, gradients(model), first))


@on_ranks(2)
def test_two_models_that_share_a_graph():
    """Their forwards run before their backwards: what one carried must not be what the other takes."""
    data = models.batches(1, 11)[0]
    first, call_first = compiled()
    second = vc.fully_shard(models.build(models.Uneven, seed=1))
    call_second = torch.compile(second, backend="vescale", options=OPTIONS)
    for _ in range(2):
        first.zero_grad(), second.zero_grad()
        losses = call_first(*data), call_second(*data)
        losses[0].backward()
        losses[1].backward()
    assert all(map(torch.equal, gradients(first), of_first_batch()))


@on_ranks(2)
def test_parameters_that_change_before_the_backward_are_refused_as_autograd_does():
    data = models.batches(1, 11)[0]
    model, call = compiled()
    loss = call(*data)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_training_that_carries_is_bit_equal_to_the_unsharded_model():
    data = models.batches(4, 11)
    model, call = compiled()
    losses = models.train(call, model.parameters(), data)
    unsharded, expected = models.train_unsharded(models.Uneven, data)
    assert losses == expected
    assert models.largest_difference(model, unsharded) == 0.0
