"""What of the process groups' own collectives the runtime avoids, because it is wrong or missing there."""

import logging
import operator
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world

from vescale_compile import backend
from vescale_compile.runtime import collectives, ops, pool
from vescale_compile.simulation import simulate

CPU = torch.device("cpu")


def reduction_over(ranks: int) -> dist.ReduceOp.RedOpType:
    """The operation of a reduce-scatter by a backend that can average."""
    with fake_world(ranks), mock.patch.object(collectives, "reduce_scatter_single") as reduce:
        assert dist.group.WORLD is not None
        full, shard = torch.ones(4), torch.empty(4 // ranks)
        collectives.start_reduce_scatter(full, shard, torch.empty(0), dist.group.WORLD)
    return reduce.call_args.kwargs["op"]


def test_gradients_of_several_ranks_are_averaged_and_those_of_one_summed():
    assert reduction_over(2) == dist.ReduceOp.AVG
    assert reduction_over(1) == dist.ReduceOp.SUM


@pytest.mark.parametrize(("version", "shared"), [("2.11.0", False), ("2.12.0", True)])
def test_groups_that_are_wrapped_for_debugging_share_no_collectives_before_torch_2_12(version, shared):
    with (
        fake_world(2),
        mock.patch.object(dist, "get_debug_level", return_value=dist.DebugLevel.DETAIL),
        mock.patch.object(torch, "__version__", version),
    ):
        assert dist.group.WORLD is not None
        assert collectives.coalesces(CPU, dist.group.WORLD) is shared


def test_gpus_whose_process_group_is_gloos_share_no_collectives():
    """Gloo's, of several tensors on a GPU, are not waited for, or not of a GPU at all."""
    with fake_world(2), mock.patch.object(collectives, "_backend", return_value="gloo"):
        assert dist.group.WORLD is not None
        assert not collectives.coalesces(torch.device("cuda"), dist.group.WORLD)


@pytest.mark.parametrize(("checks", "sent"), [("1", 0.0), ("0", 7.0)])
def test_where_nccl_looks_for_nan_what_lies_between_gradients_is_zeroed(monkeypatch, checks, sent):
    monkeypatch.setenv("TORCH_NCCL_NAN_CHECK", checks)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda like, size, dtype: torch.full((size,), 7.0, dtype=dtype))
    packed = ops.pack([torch.ones(2)], [2], [0], [], 5, torch.float32, 0)
    assert packed.tolist() == [sent, sent, 1, 1, sent]


def test_what_is_sent_of_a_slot_that_nothing_was_written_to_is_finite():
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        call = pool.StepSlots().add(lambda args: args, [pool.SlotSpec(8, torch.float64, CPU, "no other graph")])
        (slot,) = call([])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isfinite(slot).all()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["triton.cudagraphs", "cudagraph_policy"])
def test_cuda_graphs_are_off_and_one_warning_says_so(caplog, option):
    if option not in torch._inductor.list_options():
        pytest.skip(f"this PyTorch has no {option}")
    backend._warn_of_cudagraphs.cache_clear()
    seen = []
    config = torch._inductor.config
    with config.patch(option, True), caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch._dynamo.reset()
            model = models.build(models.Uneven)
            simulate(
                model,
                *models.batches(1, 11, rank=0)[0],
                cluster="h100",
                world_size=2,
                on_graph=lambda graph: seen.append(operator.attrgetter(option)(config)),
            )
    assert seen and not any(seen)
    assert caplog.text.count(f"{option} is on") == 1
