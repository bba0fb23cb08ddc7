"""The arithmetic of quantized blocks, which are the last two dimensions: written once, compiled or not."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .packing import Quantizer, StochasticQuantizer
from .rounding import Key


def encoded(quantizer: Quantizer, source: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes, uint8, and scales, int32."""
    values = source.float()
    scales = quantizer.scale_of(values.abs().amax((2, 3), keepdim=True))
    if uniform is None:
        codes = quantizer.encode(values, scales)
    else:
        codes = cast(StochasticQuantizer, quantizer).encode_stochastically(values, scales, uniform)
    return (codes & 0xFF).to(torch.uint8), scales


def decoded(quantizer: Quantizer, codes: Tensor, stored: Tensor) -> Tensor:
    """The values, float32, of codes and scales."""
    return quantizer.decode(codes.to(torch.int32), stored.to(torch.int32))


def uniform_at(places: Tensor, key: Key) -> Tensor:
    """A number in [0, 1) for each place and key, float32, as if drawn at random.

    A hash of 32 bits, triple32 of C. Wellons' hash-prospector: into its first round goes one half of the key, into the
    three that follow the other and the high half of a place. In int32, of which vectors hold twice as many as of int64:
    products wrap around, and a right shift is masked to bring no sign. Inductor writes out twice what is used twice, so
    with each round more it takes twice as long.
    """
    word = places.to(torch.int32) ^ key[0].to(torch.int32)
    word = (word ^ (word >> 17 & 0x7FFF)) * (0xED5AD4BB - (1 << 32))
    word = word + ((places >> 32).to(torch.int32) ^ key[1].to(torch.int32))
    word = (word ^ (word >> 11 & 0x1FFFFF)) * (0xAC4C1B51 - (1 << 32))
    word = (word ^ (word >> 15 & 0x1FFFF)) * 0x31848BAB
    word = word ^ (word >> 14 & 0x3FFFF)
    return (word >> 8 & 0xFFFFFF).float() * 2.0**-24
