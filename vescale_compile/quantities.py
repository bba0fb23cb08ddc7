"""Numbers, bytes and seconds as people write and read them, and tables of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from decimal import Decimal

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", re.IGNORECASE | re.ASCII)


def size_text(nbytes: int) -> str:
    """Bytes, in powers of 1000."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if round(value, 1) < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def least_text(nbytes: int) -> str:
    """Bytes rounded up, and as one word: a budget of this text has room for them."""
    exponent = next((power for power in range(3) if nbytes < 1000 ** (power + 1)), 3)
    if exponent == 0:
        return f"{nbytes}B"
    tenths = -(-10 * nbytes // 1000**exponent)
    return f"{tenths // 10}.{tenths % 10}{' kMG'[exponent]}B"


def bytes_in(text: str) -> int:
    """Bytes from a text such as ``"40GB"`` or ``"40000000000"``; 0 if it is none."""
    match = _SIZE.fullmatch(text)
    return 0 if match is None else int(Decimal(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def share_in(text: str) -> float | None:
    """A share from a text such as ``"90%"``; None if it is none, or nothing, or more than all."""
    match = _SHARE.fullmatch(text)
    share = 0.0 if match is None else float(Decimal(match[1]) / 100)
    return share if 0 < share <= 1 else None


def time_text(seconds: float) -> str:
    """Seconds, down to microseconds."""
    if round(seconds, 5) >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if round(seconds, 6) >= 1e-3 else f"{1e6 * seconds:.0f} us"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]) for name, *figures in rows]


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
