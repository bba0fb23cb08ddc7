"""What a process's resident memory is made of, as Linux, glibc and CPython tell."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """Bytes."""

    resident: int
    files: int
    """of ``resident``, pages of files: libraries and generated code"""
    objects: int
    """in use by Python objects of at most 512 bytes, which CPython keeps in arenas of its own"""
    arenas: int
    """in those arenas, and not in use"""
    blocks: int
    """that ``malloc`` has given out: tensors, larger Python objects, whatever C++ holds"""


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3), glibc 2.33 and later."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")),
        ("hblkhd", ctypes.c_size_t),  # in blocks that were mapped for themselves
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks")),
        ("uordblks", ctypes.c_size_t),  # in other blocks
        *((name, ctypes.c_size_t) for name in ("fordblks", "keepcost")),
    )


def held() -> Held:
    """What this process holds now.

    Raises RuntimeError where it can't be told: another C library, another allocator of Python's.
    """
    status = Path("/proc/self/status").read_text()  # proc(5)
    resident, files = (1024 * int(_number(rf"^{name}:\s+(\d+) kB", status)) for name in ("VmRSS", "RssFile"))
    arenas, objects = _python()
    return Held(resident, files, objects, arenas - objects, _malloced())


def _malloced() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise RuntimeError("what malloc has given out can't be told: no mallinfo2 in the C library (glibc 2.33 has it)")
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def _python() -> tuple[int, int]:
    """Bytes of all arenas, and those in use."""
    report = _written_to_stderr()
    number, size = _number(r"([\d,]+) arenas \* \d+ bytes/arena", report), _number(r"arenas \* (\d+)", report)
    return number * size, _number(r"bytes in allocated blocks\s+=\s+([\d,]+)", report)


def _written_to_stderr() -> str:
    """CPython's report of its allocator, which it writes to the file descriptor."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def _number(pattern: str, text: str) -> int:
    if (found := re.search(pattern, text, re.MULTILINE)) is None:
        raise RuntimeError(f"what this process holds can't be told: no {pattern!r} in what Python or Linux say of it")
    return int(found[1].replace(",", ""))
