"""Inverse roots of symmetric positive semidefinite matrices, for Shampoo."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this ratio of the least to the largest eigenvalue, float32 leaves the small ones fewer than three digits.
_RESOLVED = 1e-4


class NoInverseRoot(ArithmeticError):
    """A matrix whose elements, or its root's, are not finite, or whose eigenvalues can't be computed, in float64
    either."""


def inverse_root(matrix: Tensor, root: int, ridge: float) -> Tensor:
    """``(matrix + ridge * largest eigenvalue * I) ** (-1 / root)``, damped as by Anil et al. (arXiv 2002.09018).

    By an eigendecomposition in the matrix's dtype, and once more in float64 if that does not converge or does not
    resolve the least eigenvalues. The root of a matrix of zeros is taken to be I.

    Args:
        matrix: [n, n], symmetric, positive semidefinite up to rounding.
        root: 4 for the two factors of a matrix.
        ridge: damping, relative to the largest eigenvalue.

    Raises:
        NoInverseRoot: there is none.
    """
    if not bool(torch.isfinite(matrix).all()):  # LAPACK may not return from such a matrix
        raise NoInverseRoot(f"infinite or NaN elements in a matrix of shape {tuple(matrix.shape)}")
    eigen = _eigh(matrix)
    if matrix.dtype != torch.float64 and (eigen is None or bool(eigen[0][0] < _RESOLVED * eigen[0][-1])):
        eigen = _eigh(matrix.double())
    if eigen is None:
        raise NoInverseRoot(f"no eigendecomposition of a matrix of shape {tuple(matrix.shape)}, in float64 either")
    values, vectors = eigen
    if bool(values[-1] <= 0):
        return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    # Rounding makes small eigenvalues negative.
    damped = values.clamp(min=0) + ridge * values[-1]
    found = ((vectors * damped.pow(-1 / root)) @ vectors.T).to(matrix.dtype)
    if not bool(torch.isfinite(found).all()):
        raise NoInverseRoot(f"infinite or NaN elements in the root of a matrix of shape {tuple(matrix.shape)}")
    return found


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues, ascending, and eigenvectors; None if there are none that are finite."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    return (values, vectors) if bool(torch.isfinite(values).all()) else None
