"""Calls don't map memory for their frames over and over."""

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vescale_compile.frames import roomy

CALLS = 500


def faults_of_calls_at(depth: int) -> int:
    """Pages that a loop of calls has mapped, under so many frames."""
    if depth:
        return faults_of_calls_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        callee()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def callee() -> None:
    """Of a larger frame than what calls it, so that at some depth only it needs another chunk."""


callee.__code__ = callee.__code__.replace(co_stacksize=100)


def most_faults() -> int:
    return max(faults_of_calls_at(depth) for depth in range(400))


def in_a_thread(call: Callable[[], int]) -> int:
    """Where there are no frames yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_loop_of_calls_maps_no_memory_at_any_depth():
    assert in_a_thread(roomy(most_faults)) < CALLS / 10


def test_elsewhere_it_does_at_each_call_where_a_chunk_of_frames_ends():
    assert in_a_thread(most_faults) > CALLS / 2
