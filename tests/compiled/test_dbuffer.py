"""A unit's buffers: what is done to a whole unit is one kernel, and slots may be registered memory."""

from types import SimpleNamespace

import models
import pytest
import torch
import torch.distributed as dist
from kernels import Kernels
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import vescale_compile as vc
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.passes.context import Part
from vescale_compile.runtime import pool, registered
from vescale_compile.runtime.collectives import start_all_gather
from vescale_compile.runtime.reductions import add_held
from vescale_compile.sharded_module import buffers_in


def llama(layers: int = 2) -> nn.Module:
    """A sharded Llama with gradients."""
    model = Llama(LlamaConfig(layers=layers, dim=32, heads=4, kv_heads=2, vocab_size=64))
    vc.fully_shard(model)
    model(*models.batches(1, 64)[0]).backward()
    return model


@on_ranks(2)
def test_clipping_scales_each_unit_in_one_kernel():
    model = llama()
    units = buffers_in(model)
    with Kernels() as kernels:
        clip_grad_norm_(model.parameters(), 0.1)
    assert len(units) == 3 < len(list(model.parameters()))
    assert kernels.over("_foreach_mul_", "mul_") == len(units)


@on_ranks(2)
def test_the_operators_of_clipping_do_not_grow_with_the_model():
    counts = []
    for layers in (2, 4):
        model = llama(layers)
        with Kernels() as kernels:
            clip_grad_norm_(model.parameters(), 0.1)
        counts.append(len(kernels.ran))
    assert counts[0] == counts[1]


@on_ranks(2)
def test_zeroing_a_model_is_one_kernel_for_each_unit():
    model = llama()
    with Kernels() as kernels:
        model.zero_grad(set_to_none=False)
    assert kernels.over("_foreach_zero_", "zero_") == len(buffers_in(model))
    assert not any(param.grad.to_local().any() for param in model.parameters())


@on_ranks(2)
def test_zeroing_a_foreach_optimizer_is_one_kernel_for_each_unit():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with Kernels() as kernels:
        optimizer.zero_grad(set_to_none=False)
    assert kernels.over("_foreach_zero_", "zero_") == len(buffers_in(model))


@on_ranks(2)
def test_zeroing_a_model_zeroes_parameters_that_are_not_sharded_too():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plain = model[1].weight
    vc.fully_shard(model, ignored_params=[plain])
    model(torch.ones(1, 3)).sum().backward()
    model.zero_grad(set_to_none=False)
    assert plain.grad.tolist() == [[0.0] * 3] * 3


@on_ranks(2)
def test_unscaling_is_one_kernel_for_each_unit():
    model = llama()
    expected = [param.grad.full_tensor() / 8.0 for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    with Kernels() as kernels:
        scaler.unscale_(optimizer)
    assert kernels.over("_amp_foreach_non_finite_check_and_unscale_") == len(buffers_in(model))
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad.full_tensor(), grad)


@on_ranks(2)
def test_the_cast_before_a_gather_is_one_kernel_for_the_unit():
    shard = torch.randn(8)
    full = torch.empty(16, dtype=torch.bfloat16)
    with Kernels() as kernels:
        start_all_gather(shard, full, dist.group.WORLD).wait()
    assert kernels.over("copy_", "_to_copy", "clone", "cat") == 1
    mine = full[8 * dist.get_rank() :][:8]
    assert torch.equal(mine, shard.to(torch.bfloat16))


@on_ranks(2)
def test_micro_batches_are_summed_in_one_kernel_for_the_unit():
    reductions = buffers_in(vc.fully_shard(nn.Linear(5, 3)))[0].reductions
    first, second = torch.ones(2, 16).unbind()
    reductions.hold(first)
    with Kernels() as kernels:
        reductions.hold(second)
    assert kernels.ran == [("add_", 1)]
    assert reductions.unreduced.tolist() == [2.0] * 16


@on_ranks(2)
def test_what_micro_batches_sum_to_is_added_to_what_is_reduced_in_one_kernel_for_the_unit():
    reductions = buffers_in(vc.fully_shard(nn.Linear(5, 3)))[0].reductions
    reductions.hold(torch.ones(16))
    last = torch.ones(16)
    with Kernels() as kernels:
        add_held(last, reductions.handle)
    assert kernels.over("add_") == len(kernels.ran) - 1 == 1  # which reads the handle
    assert last.tolist() == [2.0] * 16
    assert reductions.unreduced is None


@on_ranks(2)
def test_a_sum_of_micro_batches_is_of_the_parameters_that_any_of_them_used():
    reductions = buffers_in(vc.fully_shard(nn.Linear(5, 3)))[0].reductions
    for used, alike in (({0}, True), ({1}, False)):
        reductions.hold(torch.ones(16))
        reductions.held(used, alike=alike)
    assert reductions.sent() == (set(), True)  # nothing yet
    reductions.take()
    reductions.held({2}, alike=True)  # of the next sum
    assert reductions.sent() == ({0, 1}, False)
    reductions.take()
    assert reductions.sent() == ({2}, False)  # which may be asked for without need
    assert reductions.sent() == (set(), True)


@on_ranks(2)
def test_a_sum_during_which_parameters_were_frozen_may_differ_from_other_ranks():
    reductions = buffers_in(vc.fully_shard(nn.Linear(5, 3)))[0].reductions
    alike = []
    for trained in ({0, 1}, {0, 1}, {0}, {0}, {0, 1}):
        reductions.read(frozenset(trained))
        alike.append(reductions.sent()[1])
    assert alike == [True, True, False, True, False]


@on_ranks(2)
def test_registered_memory_is_refused_where_the_process_group_has_none():
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(models.Uneven))
    call = torch.compile(model, backend="vescale", options={"registered_memory": True})
    with pytest.raises(Exception, match=r"registered_memory=True: the gloo process group .* leave the option out") as e:
        call(*models.batches(1, 11)[0])
    assert f"[rank {dist.get_rank()}]" in str(e.value)


@on_ranks(2)
def test_registered_memory_is_refused_where_a_graph_spans_meshes():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    vc.fully_shard(model[0])
    vc.fully_shard(model[1], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    call = torch.compile(model, backend="vescale", options={"registered_memory": True})
    with pytest.raises(Exception, match=r"registered_memory=True: one graph reads unit .*Shard both over one mesh"):
        call(torch.ones(1, 3))


def test_registered_memory_is_true_or_false():
    with pytest.raises(Exception, match=r"registered_memory='yes': give True or False"):
        torch.compile(nn.Linear(2, 2), backend="vescale", options={"registered_memory": "yes"})(torch.ones(1, 2))


@pytest.mark.slow
@on_ranks(2)
def test_slots_of_the_backward_are_allocated_with_those_of_the_forward():
    torch._dynamo.reset()
    allocated, allocate = [], pool._Memory._allocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool._Memory, "_allocate", lambda *args: allocated.append(args[1]) or allocate(*args))
        model, call = models.sharded(lambda: models.Uneven().double())  # slots larger than any other graph's here
        (graph,) = vc.explain(model, *models.batches(1, 11)[0], options={"lowering": "eager"}).graphs
        for _ in range(2):
            loss = call(*models.batches(1, 11)[0])
            assert sum(allocated) == graph.slot_bytes
            loss.backward()
    forward, backward = (graph.parts[part].slots for part in (Part.FORWARD, Part.BACKWARD))
    assert max(slot.offset for slot in backward) > max(slot.offset for slot in forward) > 0


@pytest.mark.slow
@on_ranks(2)
def test_with_registered_memory_every_slot_is_the_process_groups():
    """The process group's allocator is played by the test: gloo has none."""
    torch._dynamo.reset()
    taken: list[torch.Tensor] = []

    def allocate(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken.append(torch.empty(numel, dtype=dtype, device=device))
        return taken[-1]

    backend = SimpleNamespace(supports_tensor_alloc=lambda device: True, allocate_tensor=allocate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registered, "backend_of", lambda group, device: backend)
        model = vc.fully_shard(models.build(models.Uneven))
        call = torch.compile(model, backend="vescale", options={"lowering": "eager", "registered_memory": True})
        losses = models.train(call, model.parameters(), models.batches(2, 11))
    slots = {memory.tensor.data_ptr() for key, memory in pool._memories.items() if key[0] is dist.group.WORLD}
    assert slots == {tensor.data_ptr() for tensor in taken}
    assert slots
    _, expected = models.train_unsharded(models.Uneven, models.batches(2, 11))
    assert losses == expected
