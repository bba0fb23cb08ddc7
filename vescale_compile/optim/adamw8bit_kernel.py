"""The arithmetic of an AdamW step whose moments are 8-bit codes, for blocks in one run of memory, and its compilation.

Every operation rounds to float32 by itself, so an element's new value does not depend on where in memory, on which
rank, or (on CPU) by which of the compiled and the eager form it is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_internals.inductor import rounds_as_operators
from .blockwise import LEAST_SCALE, Codebook, block_scales, codebook, dequantize, quantize

_MOST_KERNELS = 256  # block sizes times dtypes times devices, before compiling fails; by default it would be 8
_LARGEST = 2.0**64 - 2.0**40  # the largest float32 whose square is one
BLOCK_DIMS = (1, 3)  # of a [rows of blocks, h, columns of blocks, w] view


class Coefficients(NamedTuple):
    """What a step multiplies and divides by: 0-dim float32 tensors on the CPU, so that new values compile nothing new.

    Attributes:
        lr: learning rate.
        decay: ``1 - lr * weight_decay``.
        weight1, weight2: ``1 - beta``, of the gradient and of its square.
        keep1, keep2: ``beta``, of the moments.
        correction1, correction2: ``1 - beta1**step``, and the root of ``1 - beta2**step``.
        eps: added to the denominator.
        floor: the largest second moment that is stored as 0, in units of its block's scale, times ``beta2``.
    """

    lr: Tensor
    decay: Tensor
    weight1: Tensor
    weight2: Tensor
    keep1: Tensor
    keep2: Tensor
    correction1: Tensor
    correction2: Tensor
    eps: Tensor
    floor: Tensor

    @staticmethod
    def at(step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Coefficients:
        """Those of the ``step``-th step, counted from 1. Each is rounded to float32 once."""
        beta1, beta2 = betas
        least = float(codebook(False, torch.device("cpu")).borders[0])
        values = (
            lr,
            1 - lr * weight_decay,
            1 - beta1,
            1 - beta2,
            1 - (1 - beta1),
            1 - (1 - beta2),
            1 - beta1**step,
            (1 - beta2**step) ** 0.5,
            eps,
            beta2 * least,
        )
        return Coefficients(*(torch.tensor(value, dtype=torch.float32, device="cpu") for value in values))

    def for_operators(self, device: torch.device) -> Coefficients:
        """With the divisors on ``device``: on a GPU, PyTorch's operators multiply by the reciprocal of a number that is
        on the CPU instead of dividing by it. And with the weights, which ``torch.where`` would copy there."""
        # Filled there, because a copy from the CPU would wait for it.
        names = ("weight1", "weight2", "correction1", "correction2")
        there = {name: torch.full((), float(getattr(self, name)), dtype=torch.float32, device=device) for name in names}
        return self._replace(**there)


class Codebooks(NamedTuple):
    """The maps of the first moment, which has a sign, and of the second, which has none."""

    first: Codebook
    second: Codebook

    @staticmethod
    def on(device: torch.device) -> Codebooks:
        return Codebooks(codebook(True, device), codebook(False, device))


def step_blocks(tensors: Sequence[Tensor], by: Coefficients, books: Codebooks) -> None:
    """One AdamW step (arXiv 1711.05101) in place, with moments quantized by blocks (arXiv 2110.02861).

    The moments that are stored are those that were computed, rounded to the nearest code. A second moment that is
    stored as 0 in a block above the least scale, or with a first moment that is not 0, may have been anything below the
    least code's border, and dividing by its root would move the parameter by far too much. So the denominator alone,
    not what is stored, takes that border for it, and is at least the corrected first moment: such an element moves by
    at most the learning rate.

    Args:
        tensors: parameters and gradients, [R, h, C, w] for R * C blocks of h * w elements, of any floating-point dtype;
            codes of both moments, uint8, of the same shape; scales of both, float32, [R, 1, C, 1].
        by: the step's coefficients.
        books: of the tensors' device.
    """
    param, grad, codes1, codes2, scales1, scales2 = tensors
    gradient = _clamped(grad)
    old1 = dequantize(codes1, books.first) * scales1
    old2 = dequantize(codes2, books.second) * scales2
    underflowed = (codes2 == 0) & ((scales2 > LEAST_SCALE) | (old1 != 0))
    moment1 = _average(old1, gradient, by.weight1, by.keep1)
    moment2 = _average(old2, gradient * gradient, by.weight2, by.keep2)

    corrected1 = moment1 / by.correction1
    denominator = _root(torch.where(underflowed, moment2 + by.floor * scales2, moment2)) / by.correction2
    denominator = torch.where(underflowed, torch.maximum(denominator, corrected1.abs()), denominator)
    param.copy_(param.float() * by.decay - by.lr * (corrected1 / (denominator + by.eps)))

    for moment, codes, scales, book in (
        (moment1, codes1, scales1, books.first),
        (moment2, codes2, scales2, books.second),
    ):
        scale = block_scales(moment, BLOCK_DIMS)
        codes.copy_(quantize(moment / scale, book))
        scales.copy_(scale)


def step_elements(tensors: Sequence[Tensor], by: Coefficients) -> None:
    """One AdamW step in place with float32 moments: parameters, gradients and both moments, of one shape."""
    param, grad, moment1, moment2 = tensors
    gradient = _clamped(grad)
    new1 = _average(moment1, gradient, by.weight1, by.keep1)
    new2 = _average(moment2, gradient * gradient, by.weight2, by.keep2)
    denominator = _root(new2) / by.correction2 + by.eps
    param.copy_(param.float() * by.decay - by.lr * (new1 / by.correction1 / denominator))
    moment1.copy_(new1)
    moment2.copy_(new2)


def _clamped(grad: Tensor) -> Tensor:
    """In float32, no further from 0 than what has a finite square.

    An infinite square would make the scale of its block infinite, and all of the block NaN. Were the square alone
    limited, the element would move by the learning rate times what its gradient is beyond.
    """
    return grad.float().clamp(-_LARGEST, _LARGEST)


def _average(old: Tensor, new: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
    """``old`` with ``weight`` of ``new``, as ``torch.lerp`` has it: from the nearer end, so that both ends are exact.

    ``torch.lerp`` itself rounds once less where it is vectorized, which shows at the ends of a run.
    """
    difference = new - old
    return torch.where(weight < 0.5, old + weight * difference, new - keep * difference)


def _root(x: Tensor) -> Tensor:
    """The square root, correctly rounded, as compiled code has it; on CPU PyTorch's own may be off by a bit."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return x.double().sqrt().float()
    return x.sqrt()


@functools.cache
def _compiled(device: str, function: Callable[..., None]) -> Callable[..., None]:
    # The tables are indexed by codes and by 16 bits, which nothing has to check.
    options: dict[str, Any] = {"assert_indirect_indexing": False}
    if device != "cpu":
        options |= rounds_as_operators()  # for the bits of a block that is stepped without generated code
    return torch.compile(function, fullgraph=True, options=options)


def run_compiled(function: Callable[..., None], tensors: Sequence[Tensor], *rest: object) -> None:
    """``function(tensors, *rest)`` as one Inductor kernel.

    It is compiled once for each block size, dtype and device, and serves any number of rows (dimension 0) and columns
    (dimension 2) of blocks.
    """
    for tensor in tensors:
        for dim in range(0, tensor.ndim, 2):
            if tensor.shape[dim] > 1:
                torch._dynamo.mark_dynamic(tensor, dim)
    with torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS):
        _compiled(tensors[0].device.type, function)(tensors, *rest)
