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

    Twice a multiply-xorshift hash of 32 bits, in int32, of which vectors hold twice as many as of int64: products wrap
    around, and a right shift is masked to bring no sign.
    """
    word = _mixed(places.to(torch.int32) ^ key[0].to(torch.int32))
    word = _mixed(word + (places >> 32).to(torch.int32) ^ key[1].to(torch.int32))
    return (word >> 8 & 0xFFFFFF).float() * 2.0**-24


def _mixed(word: Tensor) -> Tensor:
    word = (word ^ (word >> 16 & 0xFFFF)) * 0x21F0AAAD
    word = (word ^ (word >> 15 & 0x1FFFF)) * 0x735A2D97
    return word ^ (word >> 15 & 0x1FFFF)
