"""Matrices, stacks, layouts and references for the tests of Muon."""

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_compile.optim.muon import Muon
from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.ragged.redistribute import distribute_ragged

Shape = tuple[int, ...]

# Wide, tall, square, odd, equal ones, and stacks.
MATRICES: list[Shape] = [(16, 40), (40, 16), (24, 24), (7, 5), (16, 40), (33, 12), (16, 40), (1, 9)]
STACKS: list[Shape] = [(4, 8, 12), (3, 10, 6)]


@functools.cache
def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def random_tensors(shapes: Sequence[Shape], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of full rank; the same on every rank and for every number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def uneven(shape: Shape, seed: int) -> RaggedShard:
    """Cut at random elements; some ranks hold little or nothing."""
    rng, world, numel = random.Random(f"{seed} {shape}"), dist.get_world_size(), math.prod(shape)
    cuts = sorted(rng.choice((0, numel, rng.randint(0, numel), rng.randint(0, numel))) for _ in range(world - 1))
    units = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]
    return RaggedShard(range(len(shape)), units)


def between_experts(shape: Shape) -> RaggedShard:
    """A stack, cut between experts."""
    world, experts = dist.get_world_size(), shape[0]
    return RaggedShard((0,), [len(range(rank, experts, world)) for rank in range(world)])


def shard(full: Tensor, placement: RaggedShard) -> nn.Parameter:
    return nn.Parameter(distribute_ragged(full, world_mesh(), placement).detach())


def give_grads(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Each parameter its gradient, whole ones cut as the parameters are."""
    for param, grad in zip(params, grads, strict=True):
        if grad is None or not isinstance(param, RaggedDTensor):
            param.grad = grad if grad is None else grad.clone()
        else:
            param.grad = distribute_ragged(grad, param.device_mesh, param.placement)


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, RaggedDTensor) else tensor.detach()


def muon(params: Sequence[Tensor], **options: Any) -> Muon:
    """Muon on all of them, whatever the rule says."""
    return Muon([{"params": list(params), "algorithm": "muon"}], **options)


class TorchMuon:
    """``torch.optim.Muon`` on whole tensors; each matrix of a stack is a parameter of its own."""

    def __init__(self, fulls: Sequence[Tensor], **options: Any) -> None:
        self.params = [[nn.Parameter(m.clone()) for m in (full if full.ndim == 3 else [full])] for full in fulls]
        self.optimizer = torch.optim.Muon([m for matrices in self.params for m in matrices], **options)

    def step(self, grads: Sequence[Tensor | None]) -> None:
        for matrices, grad in zip(self.params, grads, strict=True):
            for i, matrix in enumerate(matrices):
                matrix.grad = None if grad is None else (grad[i] if grad.ndim == 3 else grad).clone()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [torch.stack([m.detach() for m in ms]) if len(ms) > 1 else ms[0].detach() for ms in self.params]
