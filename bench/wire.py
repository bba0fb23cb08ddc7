"""Hosts on one machine, with slow wires between them: network namespaces joined by rate-limited veth pairs.

Over the loopback of shared cores communication costs CPU time and no waiting, the opposite of a cluster. Through a
token bucket filter (tc-tbf(8)) on both ends of a veth pair it takes the time that the rate gives it, in each
direction, and the sender's core is free meanwhile. Two hosts are the ends of one pair; of more, each has a pair to a
bridge, in a namespace of its own. Needs root, ``ip`` and ``tc`` (iproute2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

INTERFACE = "wire0"
"""in the namespace of each host"""

_PREFIX = "bench-wire"
_BRIDGE = "bridge0"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000  # sched.h; os.setns exists from Python 3.12 on
_RATE = re.compile(r"\d+(\.\d+)?[kmgt]?bit", re.IGNORECASE)
# A bucket holds what the wire sends in a scheduler tick of 4 ms at 1 Gbit/s; a packet train waits 50 ms at most.
_FILTER = ("burst", "512kb", "latency", "50ms")
_NETWORK = "10.213.0.0/24"
# Linux acknowledges up to 40 ms late what comes; a sender that waits for it stalls, at random, where it sends 64 to 256
# KB at a time (four hosts at 2 Gbit/s: 28 ms for a gather that takes 7 otherwise).
_AT_ONCE = ("quickack", "1")
_COMMAND_S = 20.0


@dataclass(frozen=True)
class Wire:
    """Namespaces, one for each host, joined by an interface of the same name in all.

    Attributes:
        rate: that each host can send and receive, as ``tc`` reads it.
        hosts: names of their namespaces.
        ends: namespace and interface of each end of each pair, where the rate is kept.
    """

    rate: str
    hosts: tuple[str, ...]
    ends: tuple[tuple[str, str], ...] = ()

    def host_of(self, rank: int, ranks: int) -> str:
        """The namespace of a rank: with two hosts, the first half of the ranks is on the first host."""
        return self.hosts[len(self.hosts) * rank // ranks]

    def at(self, rate: str) -> Wire:
        """The same wire at another rate from now on."""
        for namespace, interface in self.ends:
            _keep_rate(namespace, interface, rate)
        return replace(self, rate=rate)


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
def wire(rate: str, hosts: int = 2) -> Iterator[Wire]:
    """Hosts joined at ``rate``, for as long as the context lasts; also removes what dead processes left.

    Raises RuntimeError with the tool's own words if one refuses.
    """
    _remove_stale()
    names = tuple(f"{_PREFIX}-{os.getpid()}-{number}" for number in range(hosts))
    switch = f"{_PREFIX}-{os.getpid()}-switch"
    try:
        for host in names:
            _run("ip", "netns", "add", host)
        ends = _join_two(*names) if hosts == 2 else _join_by_switch(names, switch)
        for number, host in enumerate(names, start=1):
            _run("ip", "-n", host, "address", "add", f"10.213.0.{number}/24", "dev", INTERFACE, "noprefixroute")
            _run("ip", "-n", host, "link", "set", "lo", "up")
        for namespace, interface in ends:
            _run("ip", "-n", namespace, "link", "set", interface, "up")
            _keep_rate(namespace, interface, rate)
        for host in names:
            _run("ip", "-n", host, "route", "add", _NETWORK, "dev", INTERFACE, *_AT_ONCE)
        yield Wire(rate, names, ends)
    finally:
        _remove((*names, switch))


def _join_two(near: str, far: str) -> tuple[tuple[str, str], ...]:
    return _join((near, INTERFACE), (far, INTERFACE))


def _join_by_switch(hosts: Sequence[str], switch: str) -> tuple[tuple[str, str], ...]:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "-n", switch, "link", "set", _BRIDGE, "up")
    ends: list[tuple[str, str]] = []
    for number, host in enumerate(hosts):
        port = f"port{number}"
        ends += _join((host, INTERFACE), (switch, port))
        _run("ip", "-n", switch, "link", "set", port, "master", _BRIDGE)
    return tuple(ends)


def _join(near: tuple[str, str], far: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    """A veth pair between two namespaces, by name and by the interface's name there."""
    (here, mine), (there, theirs) = near, far
    _run("ip", "link", "add", mine, "netns", here, "type", "veth", "peer", "name", theirs, "netns", there)
    for namespace, interface in (near, far):
        _run("ip", "-n", namespace, "link", "set", interface, "addrgenmode", "none")  # no IPv6 address to choose
    return near, far


def _keep_rate(namespace: str, interface: str, rate: str) -> None:
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate, *_FILTER)


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
            _run("ip", "netns", "delete", host)  # and with it its ends of veth pairs


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
