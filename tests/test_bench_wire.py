"""Two hosts on one machine. Needs root and iproute2, as the benchmark's --wire does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))

from wire import INTERFACE, Wire, is_rate, what_is_missing, wire  # noqa: E402

NAMESPACES = Path("/run/netns")

# What a rank does: enter its host, then open sockets.
TALK = f"""
import socket, sys, threading
sys.path.insert(0, {str(BENCH)!r})
from wire import enter
near, *_, far = sys.argv[1:]
enter(near)
listening = socket.create_server(("10.213.0.1", 0))
def answer():
    enter(far)  # of this thread alone
    with socket.create_connection(listening.getsockname(), timeout=5) as other:
        other.sendall(other.getsockname()[0].encode())
thread = threading.Thread(target=answer)
thread.start()
listening.settimeout(5)
print(listening.accept()[0].recv(99).decode(), *sorted(name for _, name in socket.if_nameindex()))
thread.join()
"""

possible = pytest.mark.skipif(what_is_missing() is not None, reason=f"no wire here: {what_is_missing()}")


@possible
@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_reach_each_other_over_the_wire_alone(hosts: int) -> None:
    with wire("1gbit", hosts) as joined:
        command = [sys.executable, "-c", TALK, *joined.hosts]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.split() == [f"10.213.0.{hosts}", "lo", "wire0"], done.stderr


def rates(namespace: str, interface: str) -> str:
    command = ["tc", "-n", namespace, "qdisc", "show", "dev", interface]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout


@possible
@pytest.mark.parametrize("hosts", [2, 3])
def test_every_host_sends_and_receives_at_the_rate_that_can_be_changed(hosts: int) -> None:
    with wire("300mbit", hosts) as joined:
        assert len(joined.ends) == 2 * (1 if hosts == 2 else hosts)
        assert all("rate 300Mbit" in rates(*end) for end in joined.ends)
        assert joined.at("400mbit").rate == "400mbit"
        assert all("rate 400Mbit" in rates(*end) for end in joined.ends)


@possible
@pytest.mark.parametrize("hosts", [2, 3])
def test_every_host_acknowledges_at_once(hosts: int) -> None:
    with wire("300mbit", hosts) as joined:
        for host in joined.hosts:
            command = ["ip", "-n", host, "route", "show", "dev", INTERFACE]
            (route,) = subprocess.run(
                command, capture_output=True, text=True, timeout=20, check=True
            ).stdout.splitlines()
            assert route.startswith("10.213.0.0/24")
            assert "quickack 1" in route


@possible
def test_hosts_are_gone_after_an_error() -> None:
    def fail(joined: Wire) -> None:
        assert all((NAMESPACES / host).exists() for host in joined.hosts)
        raise KeyError(joined)

    with pytest.raises(KeyError) as raised, wire("1gbit") as joined:
        fail(joined)
    (joined,) = raised.value.args
    assert not any((NAMESPACES / host).exists() for host in joined.hosts)


@possible
def test_what_a_killed_run_left_behind_is_removed_by_the_next() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(20)
    left = f"bench-wire-{ended.pid}-0"
    subprocess.run(["ip", "netns", "add", left], timeout=20, check=True)
    with wire("1gbit"):
        assert not (NAMESPACES / left).exists()


@possible
def test_a_rate_that_tc_refuses_is_an_error_in_its_words() -> None:
    with pytest.raises(RuntimeError, match=r"^tc .* rate fast"), wire("fast"):
        pass
    assert not list(NAMESPACES.glob(f"bench-wire-{os.getpid()}-*"))


def test_the_first_half_of_the_ranks_is_on_the_first_host() -> None:
    joined = Wire("1gbit", ("a", "b"))
    assert [joined.host_of(rank, 5) for rank in range(5)] == ["a", "a", "a", "b", "b"]
    more = Wire("1gbit", ("a", "b", "c"))
    assert [more.host_of(rank, 3) for rank in range(3)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("value", "good"), [("2gbit", True), ("1.5Gbit", True), ("500mbit", True), ("2gb", False), ("fast", False)]
)
def test_rates_are_bits_per_second(value: str, good: bool) -> None:
    assert is_rate(value) is good
