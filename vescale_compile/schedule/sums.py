"""Sums over transfers that come and go, for bounds that walk through the positions of a graph."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable

from vescale_compile.schedule.tasks import Transfer


class Joined:
    """What transfers take at least that each takes, and a collective once: mergeable ones could all share one.

    Attributes:
        seconds: of those that are there now.
    """

    def __init__(
        self, each: Callable[[Transfer], float], once: Callable[[Transfer], float], transfers: Iterable[Transfer] = ()
    ) -> None:
        self.seconds = 0.0
        self._each, self._once = each, once
        self._shared: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0])  # ascending, by collective
        for transfer in transfers:
            self.add(transfer)

    def add(self, transfer: Transfer) -> None:
        """Counts a transfer that is not there."""
        self.seconds += self._each(transfer)
        if transfer.merge is None:
            self.seconds += self._once(transfer)
        else:
            shared = self._shared[transfer.merge, transfer.lane]
            longest = shared[-1]
            insort(shared, self._once(transfer))
            self.seconds += shared[-1] - longest

    def remove(self, transfer: Transfer) -> None:
        """Counts a transfer no longer that is there."""
        self.seconds -= self._each(transfer)
        if transfer.merge is None:
            self.seconds -= self._once(transfer)
        else:
            shared = self._shared[transfer.merge, transfer.lane]
            longest = shared[-1]
            del shared[bisect_left(shared, self._once(transfer))]
            self.seconds -= longest - shared[-1]


class Knapsack:
    """The most seconds of transfers, parts of them included, whose outputs fit in some room.

    Those that save the most for their bytes are taken first. Their sums are in a binary indexed tree over that order,
    so that coming, going and asking take steps in the logarithm of how many there are.

    Args:
        transfers: all that will ever be there; none is at first.
    """

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        self._order = sorted(transfers, key=lambda each: each.output_bytes / (each.duration or 1e-300))
        self._places = {transfer.name: place for place, transfer in enumerate(self._order, start=1)}
        self._nbytes = [0] * (len(self._order) + 1)
        self._seconds = [0.0] * (len(self._order) + 1)

    def add(self, transfer: Transfer) -> None:
        """Counts a transfer that is not there."""
        self._change(transfer, transfer.output_bytes, transfer.duration)

    def remove(self, transfer: Transfer) -> None:
        """Counts a transfer no longer that is there."""
        self._change(transfer, -transfer.output_bytes, -transfer.duration)

    def most(self, room: int) -> float:
        """The most seconds that fit in ``room`` bytes."""
        seconds, left, place = 0.0, max(0, room), 0
        for bit in reversed(range(len(self._order).bit_length())):
            further = place + (1 << bit)
            if further <= len(self._order) and self._nbytes[further] <= left:
                seconds += self._seconds[further]
                left -= self._nbytes[further]
                place = further
        if place < len(self._order):  # the first that does not fit: it is there, as it has bytes
            seconds += left / self._order[place].output_bytes * self._order[place].duration
        return seconds

    def _change(self, transfer: Transfer, nbytes: int, seconds: float) -> None:
        place = self._places[transfer.name]
        while place <= len(self._order):
            self._nbytes[place] += nbytes
            self._seconds[place] += seconds
            place += place & -place
