"""Shampoo in float64, slow and plain: what the optimizer is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def power(matrix: Tensor, exponent: float, ridge: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    values = values.clamp(min=0) + ridge * values.max()
    return vectors @ torch.diag(values**exponent) @ vectors.T


@dataclass
class ReferenceBlock:
    """One block: its view of the weights, and the sums that the published algorithm keeps."""

    weight: Tensor
    first: int
    gradients: list[Tensor] = field(default_factory=list)
    roots: tuple[Tensor, Tensor] | None = None

    def average(self, beta: float, values: list[Tensor]) -> Tensor:
        """The exponential average of all values so far, by its definition, corrected for its start at 0."""
        weights = [(1 - beta) * beta ** (len(values) - 1 - i) for i in range(len(values))]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)  # type: ignore[return-value]

    def step(self, grad: Tensor, options: dict[str, Any]) -> None:
        self.gradients.append(grad.double())
        beta1, beta2 = options["betas"]
        step = len(self.gradients)
        if step >= self.first and (step - self.first) % options["frequency"] == 0:
            left = self.average(beta2, [g @ g.T for g in self.gradients])
            right = self.average(beta2, [g.T @ g for g in self.gradients])
            self.roots = power(left, -1 / 4, options["ridge"]), power(right, -1 / 4, options["ridge"])
        mean = self.average(beta1, self.gradients)
        grafted = mean
        if options["grafting"] == "adam":
            grafted = mean / (self.average(beta2, [g * g for g in self.gradients]).sqrt() + options["eps"])
        update = grafted
        if self.roots is not None:
            update = self.roots[0] @ mean @ self.roots[1]
            if options["grafting"] is not None:
                update = update * grafted.norm() / update.norm()
        self.weight.mul_(1 - options["lr"] * options["weight_decay"]).sub_(options["lr"] * update)


class ReferenceShampoo:
    """On whole float64 copies of matrices [m, n] and stacks of them [e, m, n]."""

    def __init__(self, fulls: list[Tensor], block: int, **options: Any) -> None:
        self.weights = [full.double() for full in fulls]
        self.options = {"betas": (0.9, 0.999), "eps": 1e-8, "ridge": 1e-5, "frequency": 10, "grafting": "adam"}
        self.options |= {"lr": 1e-3, "weight_decay": 0.01, **options}
        self.block = block
        self.blocks = [[ReferenceBlock(view, 0) for view in self.cut(weight)] for weight in self.weights]
        self.take_turns()

    def take_turns(self) -> None:
        """By ``frequency``: the costliest first, each round of turns one step later than the last."""
        blocks, frequency = [each for blocks in self.blocks for each in blocks], self.options["frequency"]
        for turn, each in enumerate(sorted(blocks, key=lambda each: -sum(size**3 for size in each.weight.shape))):
            each.first = 1 + (turn + turn // frequency) % frequency

    def cut(self, tensor: Tensor) -> list[Tensor]:
        matrices = tensor if tensor.ndim == 3 else tensor[None]
        rows = [band for matrix in matrices for band in matrix.split(self.block, dim=0)]
        return [block for band in rows for block in band.split(self.block, dim=1)]

    def step(self, grads: list[Tensor | None]) -> None:
        for blocks, grad in zip(self.blocks, grads, strict=True):
            if grad is not None:
                for block, part in zip(blocks, self.cut(grad), strict=True):
                    block.step(part, self.options)
