"""Two hosts on one machine, with a slow wire between them: network namespaces joined by a rate-limited veth pair.

Over the loopback of shared cores communication costs CPU time and no waiting, the opposite of a cluster. Through a
token bucket filter (tc-tbf(8)) on both ends of a veth pair it takes the time that the rate gives it, in each
direction, and the sender's core is free meanwhile. Needs root, ``ip`` and ``tc`` (iproute2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "wire0"
"""in both namespaces"""

_PREFIX = "bench-wire"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000  # sched.h; os.setns exists from Python 3.12 on
_RATE = re.compile(r"\d+(\.\d+)?[kmgt]?bit", re.IGNORECASE)
# A bucket holds what the wire sends in a scheduler tick of 4 ms at 1 Gbit/s; a packet train waits 50 ms at most.
_FILTER = ("burst", "512kb", "latency", "50ms")
_COMMAND_S = 20.0


@dataclass(frozen=True)
class Wire:
    """Two namespaces, one for each host, joined by an interface of the same name in both."""

    rate: str
    hosts: tuple[str, str]

    def host_of(self, rank: int, ranks: int) -> str:
        """The namespace of a rank: the first half of the ranks is on the first host."""
        return self.hosts[2 * rank // ranks]


def is_rate(value: str) -> bool:
    """Whether ``tc`` reads it as bits per second: ``2gbit``, ``500mbit``."""
    return _RATE.fullmatch(value) is not None


def what_is_missing() -> str | None:
    """Why there can be no wire here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"no {' and no '.join(absent)} (package iproute2)" if absent else None


@contextlib.contextmanager
def wire(rate: str) -> Iterator[Wire]:
    """Two hosts joined at ``rate``, for as long as the context lasts; also removes what dead processes left.

    Raises RuntimeError with the tool's own words if one refuses.
    """
    _remove_stale()
    hosts = (f"{_PREFIX}-{os.getpid()}-0", f"{_PREFIX}-{os.getpid()}-1")
    try:
        for host in hosts:
            _run("ip", "netns", "add", host)
        near, far = hosts
        _run("ip", "link", "add", INTERFACE, "netns", near, "type", "veth", "peer", "name", INTERFACE, "netns", far)
        for number, host in enumerate(hosts, start=1):
            _run("ip", "-n", host, "link", "set", INTERFACE, "addrgenmode", "none")  # no IPv6 address to choose
            _run("ip", "-n", host, "address", "add", f"10.213.0.{number}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", host, "link", "set", interface, "up")
            _run("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, *_FILTER)
        yield Wire(rate, hosts)
    finally:
        _remove(hosts)


def enter(host: str) -> None:
    """Moves the calling thread, and those that it starts from now on, to a host. To be called before any socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(_NAMESPACES / host) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"setns: {os.strerror(error)}", str(_NAMESPACES / host))


def _remove_stale() -> None:
    """Removes the namespaces of processes that did not live to do it."""
    left = [path.name for path in _NAMESPACES.glob(f"{_PREFIX}-*")]
    _remove([name for name in left if not Path("/proc", name.split("-")[2]).exists()])


def _remove(hosts: Iterable[str]) -> None:
    for host in hosts:
        if (_NAMESPACES / host).exists():
            _run("ip", "netns", "delete", host)  # and with it the veth pair


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
