"""Each format, computed block by block in plain Python loops with PyTorch's own 8-bit types: what ours must equal."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import vescale_compile as vc
from vescale_compile.quantize import BlockQuantizer

TINY = torch.finfo(torch.float32).tiny


def expected(quantizer: BlockQuantizer, tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank must find where ``tensor`` was gathered."""
    if tensor.dim() < 2:
        return tensor.to(dtype)
    values = tensor.detach().float().contiguous().clone()
    for block in _blocks(quantizer, values):
        block.copy_(_rounded(quantizer, block))
    return values.to(dtype)


def _blocks(quantizer: BlockQuantizer, values: Tensor) -> Iterator[Tensor]:
    match quantizer:
        case vc.BlockInt8():
            yield from values.view(-1).split(quantizer.block)
        case vc.MXFP8():
            for row in values.view(-1, values.shape[-1]):
                yield from row.split(32)
        case vc.BlockFP8():
            h, w = quantizer.tile
            for matrix in values.view(-1, *values.shape[-2:]):
                for band in matrix.split(h):
                    yield from band.split(w, dim=1)


def _rounded(quantizer: BlockQuantizer, block: Tensor) -> Tensor:
    largest = block.abs().max()
    match quantizer:
        case vc.BlockInt8():
            scale = (largest / 127).clamp(min=TINY)
            return (block / scale).round().clamp(-127, 127).to(torch.int8).float() * scale
        case vc.BlockFP8():
            scale = (largest / 448).clamp(min=TINY)
        case vc.MXFP8():
            exponent = math.floor(math.log2(largest)) if largest > 0 else -127
            scale = torch.tensor(2.0 ** max(exponent - 8, -127))
    return (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
