"""The SimpleFSDP baseline, on two ranks."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils import flop_counter

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from over_messages import simple_fsdp_over_messages
from profiling import StepProfile, profiled
from simple_fsdp import count_grouped_attention, simple_fsdp
from workload import Forward, Policy, Workload

WIDTH = 8
MATRIX = 4 * WIDTH * WIDTH  # bytes


class Model(nn.Module):
    """Two layers of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(2)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x - target).square().mean()


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def averaged_gradients() -> list[Tensor]:
    """Of the unsharded model, over the batches of both ranks."""
    torch.manual_seed(0)
    model = Model()
    loss = (model(*batch(0)) + model(*batch(1))) / 2
    return list(torch.autograd.grad(loss, list(model.parameters())))


def check_gradients(distribute: Callable[[Model, Workload, Policy], Forward], policy: Policy) -> StepProfile:
    """Profiles a step of the model, whose gradients have to be the averaged ones."""
    torch.manual_seed(0)
    model = Model()
    forward = distribute(model, Workload("none", batch=4, seq=1, dtype="fp32", device="cpu", seed=0), policy)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        forward(*batch(dist.get_rank())).backward()

    step()
    profile = profiled(step, 2, torch.device("cpu"))
    for parameter, expected in zip(model.parameters(), averaged_gradients(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), expected)
    return profile


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "bucketed", "gathered", "calls", "copied"),
    [
        # The backward needs no gradient of the input, and so not the first matrix.
        ("keep", False, 4, {"all_gather": 4, "reduce_scatter": 4}, False),
        ("reshard", True, 7, {"all_gather": 4, "reduce_scatter": 2}, True),
    ],
)
@on_ranks(2, deadline_s=300)
def test_gradients_are_the_averaged_ones_and_collectives_those_of_the_configuration(
    policy: str, bucketed: bool, gathered: int, calls: dict[str, int], copied: bool
) -> None:
    profile = check_gradients(partial(simple_fsdp, bucketed=bucketed), Policy(policy))
    collectives = profile.collectives
    assert {kind: traffic.calls for kind, traffic in collectives.items()} == calls, collectives
    assert collectives["all_gather"].payload_bytes == gathered * MATRIX, collectives
    assert collectives["reduce_scatter"].payload_bytes == 4 * MATRIX, collectives
    assert (profile.copies.copied_bytes > 0) is copied


@pytest.mark.slow
@on_ranks(2, deadline_s=300)
def test_over_our_messages_each_rank_sends_half_of_what_is_gathered_and_reduced() -> None:
    collectives = check_gradients(simple_fsdp_over_messages, Policy.KEEP).collectives
    assert collectives.keys() == {"send", "receive"}, collectives
    assert collectives["send"].calls == 8, collectives
    assert collectives["send"].payload_bytes == 8 * MATRIX / 2, collectives


def test_grouped_attention_counts_as_many_operations_as_with_its_heads_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries, grouped = (1, 4, 16, 8), (1, 2, 16, 8)
    counts = {name: getattr(flop_counter, name) for name in ("sdpa_flop_count", "sdpa_backward_flop_count")}
    for name, count in counts.items():
        monkeypatch.setattr(flop_counter, name, count)  # as it is again after the test
    count_grouped_attention.__wrapped__()
    forward, backward = counts.values()
    assert flop_counter.sdpa_flop_count(queries, grouped, grouped) == forward(queries, queries, queries)
    assert flop_counter.sdpa_backward_flop_count(queries, queries, grouped, grouped) == backward(*[queries] * 4)
