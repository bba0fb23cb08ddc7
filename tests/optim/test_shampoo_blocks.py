"""Blocks of Shampoo and inverse roots of their factors, each by itself."""

import itertools
import random
from unittest import mock

import pytest
import torch
from torch import nn

import vescale_compile as vc
from vescale_compile.optim.inverse_root import NoInverseRoot, inverse_root
from vescale_compile.optim.shampoo import Shampoo
from vescale_compile.optim.shampoo_blocks import Block, BlockGrid


def test_blocks_cover_a_shard_of_whole_bands_in_order() -> None:
    rng = random.Random(0)
    for _ in range(200):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.choice((2, 3))))
        grid = BlockGrid(shape, rng.randint(1, 5))
        matrices, rows, columns = (1, *shape)[-3:]
        bands = [e * rows + r for e in range(matrices) for r in range(0, rows, grid.size)] + [matrices * rows]
        cuts = [0, *sorted(rng.choice(bands) for _ in range(2)), matrices * rows]
        indices = []
        for first, last in itertools.pairwise(cuts):
            covered = torch.zeros(last - first, columns)
            for block in grid.held(first * columns, last * columns) or []:
                covered[block.row : block.row + block.rows, block.column : block.column + block.columns] += 1
                indices.append(block.index)
            assert (covered == 1).all()
        assert indices == list(range(grid.count))


def test_a_block_ends_with_its_matrix() -> None:
    assert BlockGrid((2, 3, 4), 2).held(0, 24) == [
        Block(0, 0, 2, 0, 2),
        Block(1, 0, 2, 2, 2),
        Block(2, 2, 1, 0, 2),
        Block(3, 2, 1, 2, 2),
        Block(4, 3, 2, 0, 2),
        Block(5, 3, 2, 2, 2),
        Block(6, 5, 1, 0, 2),
        Block(7, 5, 1, 2, 2),
    ]


@pytest.mark.parametrize("interval", [(0, 5), (0, 12), (4, 16)])
def test_a_shard_that_cuts_a_block_is_none_of_the_grids(interval: tuple[int, int]) -> None:
    assert BlockGrid((6, 4), 2).held(*interval) is None


def test_the_granularity_keeps_blocks_whole() -> None:
    granularity = Shampoo.granularity_for(block=8)
    expected = {(20, 6): vc.Rows(8), (5, 6): vc.Rows(5), (3, 16, 6): vc.Rows(8), (3, 20, 6): vc.Rows(20), (20,): None}
    for shape, blocks in expected.items():
        assert granularity("layers.0.weight", nn.Parameter(torch.zeros(shape))) == blocks
    assert Shampoo.granularity("layers.0.weight", nn.Parameter(torch.zeros(4096, 8))) == vc.Rows(1024)
    assert Shampoo.granularity("embed.weight", nn.Parameter(torch.zeros(4096, 8))) is None


def spectrum(values: list[float], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A symmetric matrix of these eigenvalues, and its eigenvectors."""
    torch.manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return (vectors @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ vectors.T).to(dtype), vectors


def test_the_inverse_root() -> None:
    matrix, vectors = spectrum([1.0, 16.0, 81.0])
    expected = vectors @ torch.diag(torch.tensor([1.0, 1 / 2, 1 / 3], dtype=torch.float64)) @ vectors.T
    torch.testing.assert_close(inverse_root(matrix, 4, 0.0), expected.float())


def test_damping_is_relative_to_the_largest_eigenvalue() -> None:
    matrix, _ = spectrum([0.0, 0.0, 16.0])
    values = torch.linalg.eigvalsh(inverse_root(matrix, 4, ridge=1.0))
    torch.testing.assert_close(values, torch.tensor([32.0, 16.0, 16.0]) ** -0.25)


def test_what_float32_does_not_resolve_is_computed_in_float64() -> None:
    rounded = spectrum([1e-6, 1e-3, 1.0])[0]
    exact = torch.linalg.eigh(rounded.double())
    expected = exact.eigenvectors @ torch.diag((exact.eigenvalues + 1e-6 * exact.eigenvalues[-1]) ** -0.25)
    torch.testing.assert_close(inverse_root(rounded, 4, 1e-6), (expected @ exact.eigenvectors.T).float())


def test_a_decomposition_that_does_not_converge_gives_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", mock.Mock(side_effect=torch.linalg.LinAlgError("no convergence")))
    with pytest.raises(NoInverseRoot, match=r"decomposition of a matrix of shape \(3, 3\)"):
        inverse_root(torch.eye(3), 4, 1e-6)


def test_a_matrix_of_zeros_preconditions_nothing() -> None:
    assert torch.equal(inverse_root(torch.zeros(3, 3), 4, 1e-6), torch.eye(3))


def test_no_root_of_infinite_elements() -> None:
    with pytest.raises(NoInverseRoot, match=r"shape \(2, 2\)"):
        inverse_root(torch.full((2, 2), float("inf")), 4, 1e-6)


def test_a_root_that_is_not_finite_is_none() -> None:
    with pytest.raises(NoInverseRoot, match="in the root"):
        inverse_root(torch.ones(2, 2), 4, ridge=0.0)
