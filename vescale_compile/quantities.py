"""Bytes and seconds in the units that people read."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """Bytes, in powers of 1000."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def time_text(seconds: float) -> str:
    """Seconds, down to microseconds."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"
