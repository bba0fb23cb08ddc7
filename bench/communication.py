"""The yardstick of communication: what a step sends, and nothing else.

Each unit (a decoder layer, or the rest) is gathered before the forward and, if parameters are resharded, before the
backward again; each is reduced after it. All gathers fly at once, and all reductions: no schedule is faster that
must gather before it reduces.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from workload import Forward, Policy, Workload

from vescale_compile.runtime import ops
from vescale_compile.runtime.collectives import scratch_numel
from vescale_compile.runtime.groups import name_group


class _Unit(NamedTuple):
    """Memory of one unit's collectives; S is a rank's share."""

    shard: Tensor  # [S]
    full: Tensor  # [world_size * S], gathered into
    gradients: Tensor  # [world_size * S], reduced from; ``full`` itself where dtypes allow it
    reduced: Tensor  # [S]
    scratch: Tensor


def communication_alone(model: nn.Module, workload: Workload, policy: Policy) -> Forward:
    """Returns a forward that gathers, with a backward that reduces. The loss is 0."""
    units = _units(model, workload)
    group = name_group(init_device_mesh(workload.device, (dist.get_world_size(),)), 0)
    again = policy is Policy.RESHARD
    anchor = torch.zeros((), device=workload.device, requires_grad=True)

    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = _Exchange.apply(anchor, units, group, again)
        return loss

    return forward


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, units: list[_Unit], group: str, again: bool) -> Tensor:
        ctx.units, ctx.group, ctx.again = units, group, again
        _gather(units, group)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.again:
            _gather(ctx.units, ctx.group)
        _reduce(ctx.units, ctx.group)
        return grads[0], None, None, None


def _gather(units: list[_Unit], group: str) -> None:
    for number, unit in enumerate(units):
        ops.start_all_gather(unit.shard, unit.full, number, group)
    for number, unit in enumerate(units):
        ops.wait_all_gather(unit.full, number)


def _reduce(units: list[_Unit], group: str) -> None:
    for number, (_, _, gradients, reduced, scratch) in enumerate(units):
        ops.start_reduce_scatter(gradients, reduced, scratch, number, group, "")
    for number, (_, _, gradients, reduced, scratch) in enumerate(units):
        ops.wait_reduce_scatter(gradients, reduced, scratch, number)


def _units(model: nn.Module, workload: Workload) -> list[_Unit]:
    ranks = _world().size()
    layers = [sum(param.numel() for param in layer.parameters()) for layer in model.get_submodule("layers").children()]
    rest = sum(param.numel() for param in model.parameters()) - sum(layers)
    policy = workload.mixed_precision
    gathered, reduced = policy.param_dtype or torch.float32, policy.reduce_dtype or torch.float32
    device = torch.device(workload.device)
    units = []
    for numel in (rest, *layers):
        share = -(-numel // ranks)
        full = torch.zeros(share * ranks, dtype=gathered, device=device)
        gradients = full if gathered == reduced else torch.zeros(share * ranks, dtype=reduced, device=device)
        scratch = torch.zeros(scratch_numel(share, device, _world()), dtype=reduced, device=device)
        shard = torch.zeros(share, dtype=gathered, device=device)
        units.append(_Unit(shard, full, gradients, torch.zeros(share, dtype=reduced, device=device), scratch))
    return units


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
