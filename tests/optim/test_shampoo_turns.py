"""In which steps Shampoo's blocks get new inverse roots."""

from collections import Counter
from typing import Any

import pytest
from shampoo_cases import plain, shampoo, train
from torch import Tensor

from vescale_compile.optim import shampoo_step
from vescale_compile.optim.shampoo_blocks import BlockGrid
from vescale_compile.optim.shampoo_turns import turns_of


def costs_by_step(grids: list[BlockGrid], frequency: int) -> list[Counter[int]]:
    """In each step, how many blocks of which cost are due, of each grid."""
    steps = [Counter[int]() for _ in range(frequency)]
    for grid, turns in zip(grids, turns_of(grids), strict=True):
        for block in grid.all_blocks():
            steps[turns.first_due(block, frequency) - 1][block.rows**3 + block.columns**3] += 1
    return steps


@pytest.mark.parametrize("shape", [(32, 32), (30, 32), (16, 27)])
def test_every_block_gets_roots_once_in_frequency_steps_and_no_step_many(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = plain([shape])  # blocks of 8 rows and columns, two factors each; shorter last ones
    blocks = -(-shape[0] // 8) * -(-shape[1] // 8)
    optimizer = shampoo(params, frequency=4)
    computed: list[int] = []

    def count(*args: Any) -> Tensor:
        computed[-1] += 1
        return root(*args)

    root = shampoo_step.inverse_root
    monkeypatch.setattr(shampoo_step, "inverse_root", count)
    for step in range(8):
        computed.append(0)
        train(optimizer, params, step, step + 1)
    assert sum(computed) == 2 * 2 * blocks
    assert max(computed) <= 2 * -(-blocks // 4)


def test_equally_costly_blocks_are_spread_over_all_steps() -> None:
    # Every second block is a small one; by their order, the large ones would be due in every second step.
    grids = [BlockGrid((1024, 1376), 1024) for _ in range(10)]
    large, small = 2 * 1024**3, 1024**3 + 352**3
    assert costs_by_step(grids, 10) == [Counter({large: 1, small: 1})] * 10


def test_a_cost_begins_with_the_step_after_the_last_of_the_higher_cost() -> None:
    grids = [BlockGrid((8, 8), 8), BlockGrid((8, 4), 8), BlockGrid((8, 8), 8)]
    assert costs_by_step(grids, 3) == [Counter({2 * 8**3: 1}), Counter({2 * 8**3: 1}), Counter({8**3 + 4**3: 1})]


def test_a_rank_with_the_same_matrix_of_each_layer_has_some_due_in_each_step() -> None:
    # Of five matrices in a layer a rank holds the second: without shifted rounds, two of ten steps would do all.
    layers, matrices, frequency = 20, 5, 10
    grids = [BlockGrid((8, 8), 8)] * (layers * matrices)
    own = [turns.first_due(turns.grid.all_blocks()[0], frequency) for turns in turns_of(grids)[1::matrices]]
    assert Counter(own) == dict.fromkeys(range(1, frequency + 1), layers // frequency)
