"""Inverse roots of symmetric positive semidefinite matrices, for Shampoo."""

from __future__ import annotations

import torch
from torch import Tensor


class NoInverseRoot(ArithmeticError):
    """A matrix whose elements, or its root's, are not finite, or whose eigenvalues can't be computed."""


def inverse_root(matrix: Tensor, root: int, ridge: float) -> Tensor:
    """``(matrix + ridge * largest eigenvalue * I) ** (-1 / root)``, damped as by Anil et al. (arXiv 2002.09018).

    By an eigendecomposition in float64: float32 resolves the least eigenvalues of hardly any factor in training.
    The root of a matrix of zeros is taken to be I.

    Args:
        matrix: [n, n], symmetric, positive semidefinite up to rounding.
        root: 4 for the two factors of a matrix.
        ridge: damping, relative to the largest eigenvalue.

    Raises:
        NoInverseRoot: there is none.
    """
    if not bool(torch.isfinite(matrix).all()):  # LAPACK may not return from such a matrix
        raise NoInverseRoot(f"infinite or NaN elements in a matrix of shape {tuple(matrix.shape)}")
    try:
        values, vectors = torch.linalg.eigh(matrix.double())
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise NoInverseRoot(f"no eigendecomposition of a matrix of shape {tuple(matrix.shape)}") from error
    if bool(values[-1] <= 0):
        return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    # Rounding makes small eigenvalues negative.
    damped = values.clamp(min=0) + ridge * values[-1]
    found = ((vectors * damped.pow(-1 / root)) @ vectors.T).to(matrix.dtype)
    if not bool(torch.isfinite(found).all()):
        raise NoInverseRoot(f"infinite or NaN elements in the root of a matrix of shape {tuple(matrix.shape)}")
    return found
