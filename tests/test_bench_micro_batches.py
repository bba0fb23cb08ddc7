"""Gradient accumulation in the benchmark: whatever a system leaves out, a step's gradients are the same."""

import math
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from worker import Job, Trainer
from workload import Policy, Workload


def norm_of_gradients(system: str, policy: Policy, micro_batches: int) -> float:
    workload = Workload("tiny", 1, 8, "fp32", "cpu", 0, micro_batches)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    job = Job(system, policy, workload, ranks, None, 1, "", "", None, 60.0, own_cache=False)
    trainer = Trainer(job, rank)
    trainer.model, trainer.batch = workload.build_model(), workload.build_batch(rank)
    trainer.set_up()
    for _ in range(2):
        trainer.optimizer.zero_grad()
        trainer.gradients()
    total = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), math.inf)
    return (total.full_tensor() if isinstance(total, DTensor) else total).item()


@pytest.mark.parametrize(
    ("system", "policy"),
    [
        ("ddp", Policy.REPLICATED),
        ("fsdp2", Policy.RESHARD),
        ("fsdp2", Policy.KEEP),
        ("vescale-eager-lowering", Policy.KEEP),
    ],
)
@on_ranks(2)
def test_gradients_of_equal_micro_batches_are_those_of_one(system, policy):
    one, several = norm_of_gradients("ddp", Policy.REPLICATED, 1), norm_of_gradients(system, policy, 3)
    assert one > 0
    assert several == pytest.approx(one, rel=1e-5)
