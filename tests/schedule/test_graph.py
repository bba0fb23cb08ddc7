"""A task graph checks itself, and says which task is wrong."""

import subprocess
import sys

import pytest

from vescale_compile.schedule import Compute, TaskGraph, Transfer

COMPUTE = (Compute("forward", 1.0), Compute("backward", 1.0))
GATHER = Transfer("gather", 0.0, 1.0, readers=(0,), output_bytes=4)


@pytest.mark.parametrize(
    ("transfer", "problem"),
    [
        (Transfer("t", -1.0, 0.0, readers=(0,)), "'t': latency -1.0 s and wire_time 0.0 s must be finite"),
        (Transfer("t", 0.0, float("inf"), readers=(0,)), "'t': .* must be finite"),
        (Transfer("t", 0.0, 1.0), "'t': nothing writes its input and nothing reads its output"),
        (Transfer("t", 0.0, 1.0, readers=(2,)), r"'t': writers and readers \(2,\) must be positions from 0 to 1"),
        (Transfer("t", 0.0, 1.0, writers=(1,), readers=(1,)), "'t': position 1 reads its output before position 1"),
        (Transfer("t", 0.0, 1.0, readers=(0,), output_bytes=-1), "'t': .*output_bytes -1 must not be negative"),
        (Transfer("t", 0.0, 1.0, writers=(0,), scratch_bytes=-1), "'t': scratch_bytes -1 must not be negative"),
        (Transfer("t", 0.0, 1.0, readers=(0,), load=1.0), r"'t': load 1.0 must be in \[0, 1\)"),
        (Transfer("t", 0.0, 1.0, readers=(0,), stretch=0.5), "'t': stretch 0.5 must be at least 1"),
        (Transfer("t", 0.0, 1.0, readers=(0,), wakeup=-1.0), "'t': wakeup -1.0 s must be finite, not negative"),
        (Transfer("t", 0.0, 1.0, readers=(0,), launch=-1.0), "'t': launch -1.0 s must be finite, not negative"),
        (Transfer("t", 0.0, 1.0, readers=(0,), issue=-1.0), "'t': issue -1.0 s must be finite, not negative"),
        (Transfer("t", 0.0, 1.0, readers=(0,), call=-1.0), "'t': call -1.0 s must be finite, not negative"),
        (Transfer("t", 0.0, 1.0, writers=(0,), then_latency=-1.0), "'t': then_latency -1.0 s must be finite"),
        (Transfer("gather", 0.0, 1.0, readers=(0,)), "two transfers are named 'gather'"),
        (Transfer("t", 0.0, 1.0, readers=(1,), repeats=1), "'t': it repeats transfer 1, which is not one before"),
        (Transfer("t", 0.0, 1.0, readers=(1,), repeats=0), "'t': .*'gather', whose output has 4 bytes, not 0"),
        (Transfer("t", 0.0, 1.0, readers=(0,), repeats=0, output_bytes=4), "'t': it is read before 'gather'"),
        (Transfer("t", 0.0, 1.0, writers=(1,), repeats=0, output_bytes=4), "'t': a transfer that repeats another"),
    ],
)
def test_a_senseless_transfer_is_refused_by_name(transfer: Transfer, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TaskGraph(COMPUTE, (GATHER, transfer))


def test_a_senseless_compute_task_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'forward': duration is nan"):
        TaskGraph((Compute("forward", float("nan")),), ())
    with pytest.raises(ValueError, match="'forward': issue is -1"):
        TaskGraph((Compute("forward", 1.0, issue=-1.0),), ())
    with pytest.raises(ValueError, match="after is -1"):
        TaskGraph((Compute("forward", 1.0),), (), after=-1.0)


def test_neither_schedules_nor_costs_load_torch() -> None:
    source = "import sys, vescale_compile.schedule, vescale_compile.cost; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
