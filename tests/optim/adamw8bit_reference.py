"""AdamW with 8-bit moments as the papers write it (arXiv 1711.05101, 2110.02861), block by block, slowly."""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_map(signed: bool) -> list[float]:
    """0, 1, and the middles of equal cells: 7 decades below 1, the top one in 64 (signed) or 128 cells, each in half
    as many as the one above it."""
    values = {0.0, 1.0}
    for decade in range(7):
        cells = (64 if signed else 128) >> decade
        for cell in range(cells):
            middle = 10.0**-decade * (0.1 + 0.9 * (cell + 0.5) / cells)
            values |= {middle, -middle} if signed else {middle}
    return sorted(values)


def nearest(values: Tensor, choices: Tensor) -> Tensor:
    """The index of the nearest choice, the upper one of two, in double precision."""
    middles = (choices[:-1].double() + choices[1:].double()) / 2
    return torch.searchsorted(middles, values.double(), right=True)


class Moments:
    """The quantized moments of one tensor in blocks of consecutive elements."""

    def __init__(self, numel: int, block: int) -> None:
        self.ranges = [slice(start, min(start + block, numel)) for start in range(0, numel, block)]
        self.maps = [torch.tensor(dynamic_map(signed)) for signed in (True, False)]
        self.codes = [torch.zeros(numel, dtype=torch.int64) for _ in range(2)]
        self.scales = [torch.zeros(len(self.ranges)) for _ in range(2)]

    def step(
        self,
        param: Tensor,
        grad: Tensor,
        step: int,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        protected: bool = True,
    ) -> None:
        """One step on flat float32 tensors; without protection as the papers have it."""
        for index, block in enumerate(self.ranges):
            moments, olds, hidden = [], [], None
            for which, target in enumerate((grad[block], grad[block] ** 2)):
                codes, scale = self.codes[which][block], self.scales[which][index].clone()
                olds.append(old := self.maps[which][codes] * scale)
                moment = old + torch.tensor(1 - betas[which]) * (target - old)
                moments.append(moment)
                if which == 1:
                    hidden = (codes == 0) & ((scale > 1e-12) | (olds[0] != 0))
                    border = float(self.maps[1][1]) / 2 * betas[1] * scale
                self.scales[which][index] = new_scale = moment.abs().max().clamp(min=1e-12)
                self.codes[which][block] = nearest(moment / new_scale, self.maps[which])
            first = moments[0].double() / (1 - betas[0] ** step)
            second = moments[1].double()
            if protected:
                second = torch.where(hidden, second + border, second)
            root = (second / (1 - betas[1] ** step)).sqrt()
            if protected:
                root = torch.where(hidden, torch.maximum(root, first.abs()), root)
            param[block] = (param[block].double() * (1 - lr * weight_decay) - lr * first / (root + eps)).float()
