"""The streams of random numbers that gradients are rounded by: one for each unit and rank.

A graph serves every unit that is laid out alike, so it takes, beside a unit's shard, a tensor that names the unit's
stream. What is rounded how then depends on nothing but the seed, the unit, the rank, and how many of the unit's
gradients were quantized before. PyTorch's generators are not touched.
"""

from __future__ import annotations

import hashlib
import itertools
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

Key = tuple[Tensor, Tensor]
"""Two numbers of 32 bits, int64 on the CPU: without dimensions, as a GPU's kernel takes them by value."""

_numbers = itertools.count()


class Rounding:
    """A unit's stream.

    Attributes:
        unit: the unit's name.
        count: gradients that were quantized; a checkpoint's, to go on from there.
        handle: [1] int64 on the CPU: names the stream in graphs.
    """

    def __init__(self, unit: str, count: int = 0) -> None:
        self.unit, self.count = unit, count
        number = next(_numbers)
        self.handle = torch.tensor([number], device="cpu")
        _living[number] = self

    def next_key(self, seed: int) -> Key:
        """The key of the next gradient's rounding."""
        text = repr((seed, self.unit, dist.get_rank(), self.count))
        self.count += 1
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        words = [int.from_bytes(half, "little") for half in (digest[:4], digest[4:])]
        first, second = (torch.tensor(word, device="cpu") for word in words)
        return first, second


_living: WeakValueDictionary[int, Rounding] = WeakValueDictionary()


def rounding_of(handle: Tensor) -> Rounding:
    """The stream that a handle names; its unit is alive while a graph runs with it."""
    return _living[int(handle.item())]
