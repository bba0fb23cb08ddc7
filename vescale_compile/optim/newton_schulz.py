"""Newton-Schulz orthogonalization of matrices, in bfloat16: what Muon does to a momentum.

The quintic iteration of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), by the
operations of ``torch.optim.Muon`` in their order, so that the bits are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NewtonSchulz(NamedTuple):
    """The iteration's options.

    Attributes:
        coefficients: a, b, c of the step X <- a X + (b A + c A A) X with A = X X^T.
        steps: how often.
        eps: the least norm that a matrix is divided by at the start.
    """

    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    steps: int = 5
    eps: float = 1e-7


def flops(shape: tuple[int, int], steps: int) -> int:
    """Floating-point operations of one matrix's iteration: two for each multiplication and addition."""
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def orthogonalize(matrix: Tensor, options: NewtonSchulz) -> Tensor:
    """A nearly orthogonal matrix with the singular vectors of the given one.

    One at a time: batches of equal shapes would be faster where matrices are small, but PyTorch chooses other kernels
    for them, by the batch's size, which shows in the bits.

    Args:
        matrix: [m, n], bfloat16; overwritten.

    Returns:
        [m, n], bfloat16, contiguous or transposed.
    """
    a, b, c = options.coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=options.eps))
    for _ in range(options.steps):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if tall else x
