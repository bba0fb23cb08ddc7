"""Sums over transfers that come and go are what they are of those that are there."""

from itertools import chain
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_compile.schedule import Transfer
from vescale_compile.schedule.sums import Joined, Knapsack


@st.composite
def transfers(draw: st.DrawFn) -> list[Transfer]:
    numbers = st.integers(0, 6)
    return [
        Transfer(
            f"transfer {index}",
            float(draw(numbers)),
            float(draw(numbers)),
            readers=(0,),
            output_bytes=draw(numbers),
            lane=draw(st.sampled_from("xy")),
            merge=draw(st.sampled_from([None, "a", "b"])),
        )
        for index in range(draw(st.integers(0, 10)))
    ]


def test_what_may_share_a_collective_takes_the_longest_latency_of_those_that_are_there() -> None:
    short, long, alone = (
        Transfer("short", 1.0, 10.0, readers=(0,), merge="gathers"),
        Transfer("long", 3.0, 20.0, readers=(0,), merge="gathers"),
        Transfer("alone", 2.0, 30.0, readers=(0,)),
    )
    wire = Joined(attrgetter("wire_time"), attrgetter("latency"), [short, long, alone])
    assert wire.seconds == 3 + 10 + 20 + 2 + 30
    wire.remove(long)
    assert wire.seconds == 1 + 10 + 2 + 30
    wire.remove(alone)
    assert wire.seconds == 1 + 10


@given(transfers(), st.data())
def test_what_has_gone_is_as_if_it_had_never_come(all_of_them: list[Transfer], data: st.DataObject) -> None:
    stay = [transfer for transfer in all_of_them if data.draw(st.booleans())]
    goes = [transfer for transfer in all_of_them if transfer not in stay]
    room = data.draw(st.integers(0, 40))
    wire, knapsack = Joined(attrgetter("wire_time"), attrgetter("latency")), Knapsack(all_of_them)
    for transfer in chain(goes, stay):
        wire.add(transfer)
        knapsack.add(transfer)
    for transfer in goes:
        wire.remove(transfer)
        knapsack.remove(transfer)
    assert wire.seconds == Joined(attrgetter("wire_time"), attrgetter("latency"), stay).seconds
    assert knapsack.most(room) == pytest.approx(filled(stay, room))


def filled(transfers: list[Transfer], room: int) -> float:
    """Byte by byte, always of what saves the most for it; what takes no room, always."""
    each_byte = sorted(
        chain.from_iterable(
            [each.duration / each.output_bytes] * each.output_bytes for each in transfers if each.output_bytes
        ),
        reverse=True,
    )
    return sum(each.duration for each in transfers if not each.output_bytes) + sum(each_byte[:room])
