"""The harness: results by rank, failures with every rank's traceback or stack, then a fresh world."""

import gc
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, fake_world, on_ranks, run_on_ranks

pytestmark = pytest.mark.slow  # left out of `make test-fast`


def sum_of_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), total


def process_id() -> int:
    return os.getpid()


def inherited() -> bool:
    return "first_compilation" in sys.modules and gc.get_freeze_count() > 0


def random_number() -> float:
    return torch.rand(()).item()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad rank")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_every_rank_returns_its_result() -> None:
    assert run_on_ranks(3, sum_of_ranks, 10) == [(rank, 33) for rank in range(3)]


def test_ranks_inherit_what_a_first_compilation_sets_up() -> None:
    assert run_on_ranks(2, inherited) == [True, True]


def test_a_world_is_kept_and_starts_every_function_from_one_seed() -> None:
    assert run_on_ranks(2, process_id) == run_on_ranks(2, process_id)
    assert run_on_ranks(2, random_number) == run_on_ranks(2, random_number)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (fail_on_rank_1, r"(?s)failed on \[1\], no answer from \[0\].*ValueError: bad rank.*in barrier"),
        (die_on_rank_1, r"(?s)failed on \[1\].*exit code 3"),
        (sleep_on_rank_1, r"(?s)no answer from \[1\].*in sleep_on_rank_1"),
    ],
)
def test_a_failure_shows_every_rank_and_ends_the_world(fn: object, message: str) -> None:
    before = run_on_ranks(2, process_id)
    with pytest.raises(RanksFailed, match=message):
        run_on_ranks(2, fn, deadline_s=3)
    assert not set(before) & set(run_on_ranks(2, process_id))


@on_ranks(2, 3)
@pytest.mark.parametrize("number", [1, 2])
def test_a_body_runs_on_every_rank_with_its_parameters(number: int) -> None:
    assert dist.get_world_size() in (2, 3) and number in (1, 2)


def test_a_fake_world_has_any_size() -> None:
    with fake_world(1024, rank=5):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 1024)
    assert not dist.is_initialized()
