"""A step on a real GPU, over nccl: what is launched, where, and what memory it takes. Skipped where there is none."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from null_gpu.build import python

STEP = Path(__file__).with_name("gpu_step.py")
WORKSPACES = 2 * (32 << 20)
"""bytes that PyTorch gives cuBLAS on Hopper GPUs, once for the thread of the forward and once for the backward's"""
PRODUCT = "nvjet|gemm|cutlass"
"""what cuBLAS calls its matrix products"""
ROUNDED = 5 * 512
"""more bytes than PyTorch's allocator adds to a buffer for each unit"""

pytestmark = [
    pytest.mark.slow,  # left out of `make test-fast`
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that PyTorch can use"),
]


@dataclass
class Step:
    """What the first of two ranks said."""

    peak: int
    planned: int
    found: int
    """graphs in AOTAutograd's cache"""
    scheduled: list[list[str | int]]
    launched: list[list[str | int]]
    """each collective's kind, and the elements of a shard"""
    census: list[list[str | int]]
    counted: list[list[str | int]]
    """by the graphs and by a profile: part, kind, direction, bytes. Joined gathers are one in a profile"""
    kernels: list[tuple[int, str, float, float]]
    """stream, name, start and end in microseconds"""

    def of(self, names: str) -> Iterator[tuple[int, str, float, float]]:
        return (kernel for kernel in self.kernels if re.search(names, kernel[1]))

    def streams(self, names: str) -> set[int]:
        return {stream for stream, *_ in self.of(names)}


def trained(folder: Path) -> Step:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return Step(**json.loads(python(environment, STEP).stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def step(folder: Path) -> Step:
    return trained(folder)


def test_collectives_are_launched_in_the_order_of_the_schedule(step: Step) -> None:
    assert len(step.launched) > 2 and step.launched == step.scheduled


def test_gathers_reductions_and_computation_have_streams_of_their_own(step: Step) -> None:
    gathers, reductions, products = (step.streams(name) for name in ("AllGather", "ReduceScatter", PRODUCT))
    assert len(gathers) == len(reductions) == len(products) == 1
    assert len(gathers | reductions | products) == 3


@pytest.mark.parametrize("kind", ["AllGather", "ReduceScatter"])
def test_something_is_computed_while_a_collective_is_on_its_way(kind: str, step: Step) -> None:
    beside = [
        product
        for product in step.of(PRODUCT)
        for collective in step.of(kind)
        if collective[2] < product[2] < collective[3]
    ]
    assert beside


def test_nothing_is_copied_from_one_place_on_the_gpu_to_another(step: Step) -> None:
    assert not list(step.of("Memcpy DtoD"))


def test_the_census_of_the_graphs_is_that_of_the_step(step: Step) -> None:
    graphs, profile = ({tuple(what): nbytes for *what, nbytes in found} for found in (step.census, step.counted))
    assert graphs and graphs.keys() == profile.keys()
    for what, nbytes in graphs.items():
        # A profile has buffers as large as PyTorch's allocator makes them.
        assert 0 <= profile[what] - nbytes < (ROUNDED if "Kind.BUFFER" in what else 1), what


def test_the_peak_is_what_was_planned_with_the_workspaces_of_cublas(step: Step) -> None:
    assert step.peak - WORKSPACES == pytest.approx(step.planned, rel=0.03)


def test_a_second_start_finds_the_graphs_of_the_first_and_launches_the_same(step: Step, folder: Path) -> None:
    again = trained(folder)
    assert (step.found, again.found) == (0, 1)
    assert again.launched == step.launched
