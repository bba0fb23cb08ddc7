"""What the benchmarks' command lines share: kinds of values, and the record of a run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import wire

PICTURES = (".png", ".svg", ".pdf")

Name = TypeVar("Name", bound=str)


def end_as_interrupted() -> None:
    """An end by `kill` unwinds like one by Ctrl-C from here on: ranks are ended, and network namespaces removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def count(value: str) -> int:
    """An option that is a whole number of at least 1."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return int(value)


def seconds(value: str) -> float:
    """An option that is a time above 0."""
    number = float(value)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number of seconds")
    return number


def some_of(what: str, known: Collection[Name], separator: str = ",") -> Callable[[str], list[Name]]:
    """Makes an option of names, each of ``known``, once and in the order given. ``what`` they name, for messages."""
    by_name = {str(each): each for each in known}

    def read(value: str) -> list[Name]:
        names = list(dict.fromkeys(value.split(separator)))
        if unknown := [name for name in names if name not in by_name]:
            missing, existing = (f"{separator} ".join(each) for each in (unknown, by_name))
            raise argparse.ArgumentTypeError(f"no {what} {missing}; there are {existing}")
        return [by_name[name] for name in names]

    return read


def rate(value: str) -> str:
    """An option that is a bandwidth, as ``tc`` writes it."""
    if not wire.is_rate(value):
        raise argparse.ArgumentTypeError(f"{value} is not a rate in bits per second, as 2gbit or 500mbit")
    return value


def check_ranks(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program unless the ranks asked for can be on a wire, or on GPUs, as asked."""
    if args.wire is not None and (args.device == "cuda" or args.ranks < 2):
        parser.error("--wire: needs at least 2 --ranks, on cpu")
    if args.device == "cuda" and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks}: there are {torch.cuda.device_count()} GPUs, and each rank needs one")


def check_folder(parser: argparse.ArgumentParser, option: str, path: Path | None) -> None:
    """Ends the program unless a file can be written at ``path``, if there is one."""
    if path is not None and not path.parent.is_dir():
        parser.error(f"{option} {path}: there is no folder {path.parent}")


def check_picture(parser: argparse.ArgumentParser, option: str, path: Path | None) -> None:
    """Ends the program unless a picture can be drawn to ``path``, if there is one."""
    check_folder(parser, option, path)
    if path is not None and path.suffix not in PICTURES:
        parser.error(f"{option} {path}: the name must end in {', '.join(PICTURES)}")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"{option}: needs matplotlib; pip install 'vescale-compile[plot]'")


# Variables that change what is measured.
_SETTINGS = ("GLOO_", "MALLOC_", "MKL_", "NCCL_", "OMP_")


def write_record(path: Path, measured: dict[str, Any]) -> None:
    """Writes figures as JSON, after the date, the command, the versions and the machine that they are of."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        "machine": {"platform": platform.platform(), "cpus": len(os.sched_getaffinity(0))},
        **measured,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
