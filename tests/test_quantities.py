"""Bytes and seconds as text, and tables of them."""

import pytest

from vescale_compile.quantities import bytes_in, in_columns, least_text, share_in, size_text, time_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (5 * 10**12, "5000.0 GB")],
)
def test_bytes_are_in_the_unit_in_which_they_are_less_than_a_thousand(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (9.994e-4, "999 us"), (9.996e-4, "1.00 ms"), (0.99994, "999.94 ms"), (0.999996, "1.00 s")],
)
def test_so_are_seconds(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize("nbytes", [0, 7, 999, 1001, 123_456_789, 10**12 + 1])
def test_a_budget_of_the_text_has_room_for_the_bytes(nbytes: int) -> None:
    assert nbytes <= bytes_in(least_text(nbytes)) <= 1.1 * nbytes


@pytest.mark.parametrize(
    ("text", "share"),
    [("90%", 0.9), (" 12.5 % ", 0.125), ("100%", 1.0), ("100.1%", None), ("0%", None), ("-5%", None), ("90", None)],
)
def test_a_share_is_some_percent_of_all_or_none(text: str, share: float | None) -> None:
    assert share_in(text) == share


def test_names_stand_to_the_left_and_figures_to_the_right() -> None:
    assert in_columns([("what", "ms"), ("a", "10.5")]) == ["what    ms", "a     10.5"]
