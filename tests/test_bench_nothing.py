"""The benchmarks' process group that sends nothing: what its collectives leave in memory."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import run_forked
from scripts import BENCH

WORLD = 4


def in_a_world(check: Callable[[], None]) -> None:
    """In a process of its own, whose collectives stay replaced."""
    done = run_forked(_joined, (check.__name__,), deadline_s=60)
    assert done.returncode == 0, done.stderr


def _joined(arguments: tuple[str, ...]) -> None:
    sys.path.insert(0, str(BENCH))
    import nothing

    nothing.join(WORLD)
    globals()[arguments[0]]()


def test_a_gather_brings_this_ranks_part_to_every_place() -> None:
    in_a_world(_gathers)


def _gathers() -> None:
    part, whole = torch.arange(3.0), torch.zeros(WORLD * 3)
    dist.all_gather_into_tensor(whole, part)
    assert torch.equal(whole, part.repeat(WORLD))


def test_so_does_one_of_a_part_in_its_place() -> None:
    in_a_world(_gathers_in_place)


def _gathers_in_place() -> None:
    whole = torch.zeros(WORLD * 3)
    part = whole[:3].copy_(torch.arange(3.0))
    dist.all_gather_into_tensor(whole, part)
    assert torch.equal(whole, torch.arange(3.0).repeat(WORLD))


def test_a_reduction_gives_this_rank_its_own_part() -> None:
    in_a_world(_reduces)


def _reduces() -> None:
    whole, part = torch.arange(12.0), torch.zeros(3)
    dist.reduce_scatter_tensor(part, whole)
    assert torch.equal(part, whole[:3])


def test_several_joined_do_as_each_does() -> None:
    in_a_world(_joined_ones)


def _joined_ones() -> None:
    parts, wholes = [torch.arange(3.0), torch.ones(2)], [torch.zeros(WORLD * 3), torch.zeros(WORLD * 2)]
    group = dist.group.WORLD
    group.allgather_into_tensor_coalesced(wholes, parts)
    assert all(torch.equal(whole, part.repeat(WORLD)) for whole, part in zip(wholes, parts, strict=True))
    results = [torch.zeros(3), torch.zeros(2)]
    group.reduce_scatter_tensor_coalesced(results, wholes)
    assert all(map(torch.equal, results, parts))
