"""The streams of random numbers that gradients are rounded by: one for each unit and rank.

What is rounded how depends on nothing but the seed, the unit, the rank, and how many of the unit's gradients were
quantized before. PyTorch's generators are not touched.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Key = tuple[Tensor, Tensor]
"""Two numbers of 32 bits, int64 on the CPU: without dimensions, as a GPU's kernel takes them by value."""


@dataclass(eq=False)
class Rounding:
    """A unit's stream.

    Attributes:
        unit: the unit's name.
        count: gradients that were quantized; a checkpoint's, to go on from there.
    """

    unit: str
    count: int = 0

    def next_key(self, seed: int) -> Key:
        """The key of the next gradient's rounding."""
        text = repr((seed, self.unit, dist.get_rank(), self.count))
        self.count += 1
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        words = [int.from_bytes(half, "little") for half in (digest[:4], digest[4:])]
        first, second = (torch.tensor(word, device="cpu") for word in words)
        return first, second
