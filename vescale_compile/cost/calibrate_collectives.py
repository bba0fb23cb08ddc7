"""Measures the collectives of this machine, for the cost model: only when it is asked to."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from vescale_compile.cost.cluster import MeasuredCollective
from vescale_compile.cost.collectives import ALL_GATHER, ALL_TO_ALL, KINDS, REDUCE_SCATTER
from vescale_compile.runtime.collectives import (
    Pending,
    scratch_numel,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)

# Rows, size, number and dtype of matrices that are multiplied: a product takes a small part of the largest collective.
_BESIDE = {"cpu": (64, 1024, 16, torch.float32), "cuda": (4096, 4096, 1, torch.bfloat16)}
_COLLECTIVE_BYTES = {
    "cpu": (1 << 18, 1 << 20, 1 << 22, 1 << 24),
    "cuda": (1 << 20, 1 << 23, 1 << 26, 1 << 29),  # as a unit's: smaller ones don't fill the links
}
_FEWEST, _MOST, _SECONDS = 5, 45, 1.5  # repetitions of a collective: as many as find room in this time, within bounds
_BATCHES, _BATCH, _BATCH_BYTES = 5, 5, 1 << 24  # of collectives: how many in each, at least, and how much
_CALLS = 20  # of a collective, whose host takes no notice of when they end
_PAUSE, _SHARES = 3, (0.5, 2.0)  # products before a collective; how much of its time those beside it take
_LOADS, _STRETCHES = [i / 50 for i in range(46)], [1 + i / 20 for i in range(41)]


def calibrate_collectives(
    device: str = "cpu",
    *,
    kinds: Sequence[str] = KINDS,
) -> dict[str, MeasuredCollective]:
    """Measures collectives alone, as :func:`.calibrate.calibrate` does; every rank calls this.

    A unit's gathers and reductions are those of the runtime, which for gloo are not the library's.

    Args:
        device: as for :func:`.calibrate.calibrate`.
        kinds: which. Without replicas nothing is all-reduced; an all-to-all is for ``quantize_gradients``.

    Raises:
        ValueError: an unknown kind.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"calibrate_collectives: no collective {', '.join(unknown)}; there are {', '.join(KINDS)}")
    bench = _Bench(device)
    return {kind: bench.measure(kind) for kind in kinds}


class _Bench:
    """Measures a collective, and computation before it and beside it, on all ranks alike."""

    def __init__(self, device: str) -> None:
        self.device, self.agree = device, Slowest(device)
        rows, size, count, dtype = _BESIDE[device]
        self.a, *self.matrices = (torch.randn(n, size, device=device).to(dtype) for n in (rows, *[size] * count))
        self.out = torch.empty_like(self.a)

    def measure(self, kind: str) -> MeasuredCollective:
        ranks = dist.get_world_size()
        sizes = [nbytes // (4 * ranks) * 4 * ranks for nbytes in _COLLECTIVE_BYTES[self.device]]
        seconds, after_pauses, launches, calls = [], [], [], []
        for nbytes in sizes:
            start, other = (self._collective(kind, nbytes // 4, ranks) for _ in range(2))
            seconds += self.agree([self._in_a_row((start, other), nbytes)])
            returned, ended = self.agree(self._after_a_pause(start, seconds[-1]))
            launches.append(returned)
            calls += self.agree([self._call(start)])
            after_pauses.append(ended)
        latency, bandwidth = fit(sizes, seconds)
        longer = statistics.median(late - soon for late, soon in zip(after_pauses, seconds, strict=True))
        launch = statistics.median(launches)  # of middling size: what more of it takes is found as load
        load, stretch = self._contention(start, seconds[-1], launch)
        return MeasuredCollective(latency, bandwidth, load, stretch, max(0.0, longer), launch, statistics.median(calls))

    def _in_a_row(self, starts: Sequence[Callable[[], Pending]], nbytes: int) -> float:
        """Seconds of one of many, each launched before the last one is waited for. One alone, or a few small ones, can
        seem faster than the wire is: by what a switch or a socket buffers, or by what a peer has sent before this rank
        began to count."""
        count = max(_BATCH, _BATCH_BYTES // nbytes)
        batches = []
        for _ in range(1 + _BATCHES):
            dist.barrier()
            begin = self._now()
            pending = starts[0]()
            for number in range(1, count):
                last, pending = pending, starts[number % len(starts)]()
                last.wait()
            pending.wait()
            batches.append((self._now() - begin) / count)
        return statistics.median(batches[1:])

    def _call(self, start: Callable[[], Pending]) -> float:
        """Seconds of a GPU's host for one of several in a row; a CPU's are in its launch."""
        if self.device == "cpu":
            return 0.0
        begin = self._now()
        for _ in range(_CALLS):
            start().wait()
        return (time.perf_counter() - begin) / _CALLS

    def _after_a_pause(self, start: Callable[[], Pending], estimate: float) -> list[float]:
        """Seconds of the launch, and of all, of one that follows computation, as in a training step: the ranks do not
        come at the same time, and threads and connections have been idle. A launch keeps a GPU from nothing."""
        launches, taken = [], []
        for _ in range(_repetitions(estimate)):
            self._multiply(_PAUSE)
            begin = self._now()
            pending = start()
            launches.append(self._now() - begin if self.device == "cpu" else 0.0)
            pending.wait()
            taken.append(self._now() - begin)
        return [statistics.median(launches), statistics.fmean(taken)]

    def _contention(self, start: Callable[[], Pending], estimate: float, launch: float) -> tuple[float, float]:
        """What computation and a collective take of each other: ``load`` and ``stretch`` of
        :class:`MeasuredCollective`.

        They are found from computation beside it that is over before it, and from computation that lasts longer:
        products with matrices that on a CPU are not in its caches, as in a training step.

        Args:
            start: launches the collective.
            estimate: of the seconds that it takes by itself.
            launch: seconds of that until its launch returns.
        """
        product = self.agree([self._both(None, _PAUSE) / _PAUSE])[0]
        few, many = (max(_PAUSE, round(share * estimate / product)) for share in _SHARES)
        cases = [(start, 0), (None, few), (start, few), (None, many), (start, many)]
        times = [[self._both(*case) for case in cases] for _ in range(_repetitions(estimate * sum(_SHARES) * 2))]
        alone, short, short_beside, long, long_beside = self.agree(
            [statistics.median(column) for column in zip(*times, strict=True)]
        )
        return contention(
            max(0.0, alone - launch),
            short,
            max(short, short_beside - launch),
            long,
            max(long, long_beside - launch),
        )

    def _both(self, start: Callable[[], Pending] | None, products: int) -> float:
        """Seconds of a collective, if there is one, and products beside it."""
        dist.barrier()
        begin = self._now()
        pending = None if start is None else start()
        self._multiply(products)
        if pending is not None:
            pending.wait()
        return self._now() - begin

    def _multiply(self, products: int) -> None:
        for number in range(products):
            torch.mm(self.a, self.matrices[number % len(self.matrices)], out=self.out)

    def _collective(self, kind: str, numel: int, ranks: int) -> Callable[[], Pending]:
        """Launches one in memory of its own."""
        group = dist.group.WORLD
        assert group is not None
        full, part = (torch.zeros(size, device=self.device) for size in (numel, numel // ranks))
        if kind == ALL_GATHER:
            return lambda: start_all_gather(part, full, group)
        if kind == REDUCE_SCATTER:
            scratch = full.new_zeros(scratch_numel(part.numel(), full.device, group))
            return lambda: start_reduce_scatter(full, part, scratch, group)
        if kind == ALL_TO_ALL:
            received = torch.zeros_like(full)
            return lambda: start_all_to_all(full, received, group)
        return lambda: cast(Pending, dist.all_reduce(full, dist.ReduceOp.SUM, group, async_op=True))

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def _repetitions(seconds: float) -> int:
    """How often to measure what takes that long: alike on ranks that agree about it."""
    return min(_MOST, max(_FEWEST, round(_SECONDS / seconds)))


class Slowest:
    """The largest of each of some figures over the ranks."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, seconds: list[float]) -> list[float]:
        figures = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        return figures.tolist()


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency (s) and bandwidth (bytes/s) of ``seconds = latency + size / bandwidth``.

    Least squares of the errors, each weighted by the inverse of the time itself: small sizes count, but large ones are
    where time goes. The latency is not negative.
    """
    weights = [1 / each for each in seconds]
    total = sum(weights)
    mean_size = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean = sum(w * y for w, y in zip(weights, seconds, strict=True)) / total
    moment = sum(w * (x - mean_size) * (y - mean) for w, x, y in zip(weights, sizes, seconds, strict=True))
    slope = moment / sum(w * (x - mean_size) ** 2 for w, x in zip(weights, sizes, strict=True))
    latency = mean - slope * mean_size
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, seconds[-1] / sizes[-1]
    return latency, 1 / slope


def contention(alone: float, short: float, short_beside: float, long: float, long_beside: float) -> tuple[float, float]:
    """``load`` and ``stretch`` of a collective which explain five times best, in seconds. Both together take no longer
    than one after the other: the product is at most 1.

    Args:
        alone: of the collective, once its launch has returned.
        short: of computation that is over before the collective.
        short_beside: of both together.
        long: of computation that lasts longer than the collective.
        long_beside: of both together.
    """

    def error(shares: tuple[float, float]) -> float:
        pairs = ((short, short_beside), (long, long_beside))
        return sum((together(work, alone, *shares) / measured - 1) ** 2 for work, measured in pairs)

    possible = [(load, stretch) for load, stretch in itertools.product(_LOADS, _STRETCHES) if load * stretch <= 1]
    return min(possible, key=error)


def together(work: float, alone: float, load: float, stretch: float) -> float:
    """Seconds until both are done: computation of ``work`` seconds and a collective of ``alone``, begun together."""
    both = min(work / (1 - load), alone * stretch)
    return both + (work - both * (1 - load)) + (alone - both / stretch)


def synchronize(device: str) -> None:
    """Waits for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
