"""The yardstick of communication, on two ranks."""

import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from communication import communication_alone
from profiling import profiled
from workload import Policy, Workload


@pytest.mark.parametrize(("policy", "gathers"), [(Policy.KEEP, 1), (Policy.RESHARD, 2)])
@on_ranks(2)
def test_a_step_sends_half_of_all_parameters_for_each_gather_and_for_the_reduction(policy: Policy, gathers: int):
    workload = Workload("tiny", 1, 8, "fp32", "cpu", 0)
    model = workload.build_model()
    forward = communication_alone(model, workload, policy)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    profile = profiled(lambda: forward(tokens, tokens).backward(), 2, torch.device("cpu"))
    nbytes = 4 * sum(param.numel() for param in model.parameters())
    assert profile.collectives["send"].sent_bytes == pytest.approx((gathers + 1) * nbytes / 2, rel=1e-3)
    assert profile.copies.copied_bytes == 0
    assert profile.copies.copy_in_bytes == pytest.approx(gathers * nbytes / 2, rel=1e-3)
