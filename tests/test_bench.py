"""`python bench/compare.py`, run as a user runs it, and the arithmetic of its figures."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import BENCH, run_script

sys.path.append(str(BENCH))

from traffic import count
from workload import Policy

DEADLINE_S = 600
TINY = ("--model", "tiny", "--batch", "2", "--seq", "16", "--steps", "2", "--warmup", "1", "--warm-starts", "1")
PARAMETERS = 47264  # of the tiny model

# Systems that only a test would want. Ranks import the main script too, and so know them.
FAULTY = f"""
import os, sys, time
sys.path.insert(0, {str(BENCH)!r})
import compare
import torch.distributed as dist
from systems import SYSTEMS, System
from workload import Policy

def raises(model, workload, policy):
    raise ValueError("a fault of its own")

def dies(model, workload, policy):
    if dist.get_rank() == 1:
        os._exit(7)
    return model

def hangs(model, workload, policy):
    if dist.get_rank() == 1:
        time.sleep(3600)
    return model

def forgets_to_reduce(model, workload, policy):
    return model

for fault in (raises, dies, hangs, forgets_to_reduce):
    SYSTEMS[fault.__name__] = System(fault.__name__, fault, (Policy.REPLICATED,))

if __name__ == "__main__":
    sys.exit(compare.main())
"""


def compared(script: Path, folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """A finished run, and what it wrote as JSON."""
    written = folder / "measured.json"
    done = run_script(script, *TINY, *options, "--json", str(written), deadline_s=DEADLINE_S)
    return done, json.loads(written.read_text()) if written.exists() else done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Any]:
    systems = ("--systems", "ddp,fsdp2,vescale-eager-lowering")
    return compared(BENCH / "compare.py", tmp_path_factory.mktemp("run"), *systems)


def result(measured: Any, system: str, policy: Policy) -> Any:
    (found,) = [r for r in measured["results"] if (r["system"], r["policy"]) == (system, policy)]
    return found


@pytest.mark.slow
def test_every_system_runs_under_its_policies_and_computes_the_same(run: Any) -> None:
    done, measured = run
    assert done.returncode == 0, done.stderr
    assert [(r["system"], r["policy"], r["error"]) for r in measured["results"]] == [
        ("ddp", "unsharded", None),
        ("fsdp2", "reshard", None),
        ("fsdp2", "keep", None),
        ("vescale-eager-lowering", "reshard", None),
        ("vescale-eager-lowering", "keep", None),
    ]
    first, *others = [r["losses"] for r in measured["results"]]
    assert len(first) == 1 + 2 * 2  # one untimed step before each timed one
    assert all(before > after for before, after in itertools.pairwise(first))
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5)
    assert max(measured["relative_differences"].values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "policy", "calls"),
    [
        ("ddp", Policy.REPLICATED, {"all_reduce": 1}),
        ("fsdp2", Policy.KEEP, {"all_gather": 3, "reduce_scatter": 3}),
        ("fsdp2", Policy.RESHARD, {"all_gather": 5, "reduce_scatter": 3}),  # the root is not resharded
    ],
)
def test_collectives_of_a_step_are_counted(run: Any, system: str, policy: Policy, calls: dict[str, int]) -> None:
    collectives = result(run[1], system, policy)["profile"]["collectives"]
    assert {kind: traffic["calls"] for kind, traffic in collectives.items()} == calls


@pytest.mark.slow
def test_bytes_of_a_step_are_those_of_the_parameters(run: Any) -> None:
    _, measured = run
    reduced = result(measured, "ddp", Policy.REPLICATED)["profile"]["collectives"]["all_reduce"]
    assert reduced["payload_bytes"] == reduced["sent_bytes"] == 4 * PARAMETERS
    for kind in ("all_gather", "reduce_scatter"):
        sharded = result(measured, "fsdp2", Policy.KEEP)["profile"]["collectives"][kind]
        assert sharded["payload_bytes"] == 4 * PARAMETERS
        assert sharded["sent_bytes"] == sharded["payload_bytes"] / 2


@pytest.mark.slow
def test_copies_around_a_steps_collectives_are_counted(run: Any) -> None:
    _, measured = run
    # FSDP2 copies its shards in before a gather, all that is gathered out after it, and every gradient in.
    of_fsdp2 = result(measured, "fsdp2", Policy.KEEP)["profile"]["copies"]
    assert of_fsdp2["copied_bytes"] == (1 + 1) * 4 * PARAMETERS
    assert of_fsdp2["copy_in_bytes"] == 1 / 2 * 4 * PARAMETERS
    assert of_fsdp2["cast_bytes"] == 0
    ours = result(measured, "vescale-eager-lowering", Policy.KEEP)["profile"]["copies"]
    assert ours["copied_bytes"] == 0
    assert ours["copy_in_bytes"] == pytest.approx(of_fsdp2["copy_in_bytes"], rel=1e-3)  # and padding
    assert result(measured, "ddp", Policy.REPLICATED)["profile"]["copies"]["copied_bytes"] == 0


@pytest.mark.slow
def test_times_and_memory_are_measured_on_every_rank(run: Any) -> None:
    for one in run[1]["results"]:
        assert len(one["warmup_s"]) == 1 and len(one["steps_s"]) == 2
        assert [len(steps) for steps in one["warm_warmups_s"]] == [1]
        assert min(one["steps_s"]) > 0 and min(one["steps_cpu_s"]) > 0
        assert len(one["memory"]) == 2
        for memory in one["memory"]:
            assert memory["peak"] >= memory["peak_of_steps"] > memory["baseline"] > 2**26


@pytest.mark.slow
def test_tensors_of_a_step_are_counted_and_what_was_planned_is_shown(run: Any) -> None:
    _, measured = run
    # Parameters, two moments and gradients; a replica has them all, a rank of two half of them.
    states = 4 * 4 * PARAMETERS
    assert result(measured, "ddp", Policy.REPLICATED)["profile"]["tensor_peak"] >= states
    ours = result(measured, "vescale-eager-lowering", Policy.RESHARD)
    assert states / 2 <= ours["profile"]["tensor_peak"] == pytest.approx(ours["planned_bytes"], rel=0.1)


@pytest.mark.slow
def test_one_process_shows_what_a_rank_of_many_does(tmp_path: Path) -> None:
    options = ("--world", "8", "--systems", "fsdp2", "--policies", "keep", "--warm-starts", "2", "--cold-starts", "4")
    done, measured = compared(BENCH / "compare.py", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert len(result(measured, "fsdp2", Policy.KEEP)["warm_warmups_s"]) == 2
    assert len(result(measured, "fsdp2", Policy.KEEP)["cold_warmups_s"]) == 3
    profile = result(measured, "fsdp2", Policy.KEEP)["profile"]
    assert profile["collectives"]["all_gather"]["sent_bytes"] == 7 / 8 * 4 * PARAMETERS
    assert profile["copies"]["copied_bytes"] == (1 + 1) * 4 * PARAMETERS
    assert profile["copies"]["copy_in_bytes"] == 1 / 8 * 4 * PARAMETERS
    assert measured["relative_differences"] == {}
    assert "Nothing checks what was computed" in done.stdout


@pytest.mark.slow
def test_a_system_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    done, measured = compared(script, tmp_path, "--systems", "raises,dies,hangs,ddp", "--deadline", "15")
    assert done.returncode == 1
    errors = {r["system"]: r["error"] for r in measured["results"]}
    assert "[rank 0] build" in errors["raises"] and "ValueError: a fault of its own" in errors["raises"]
    assert "[rank 1] build: the process died (exit code 7)" in errors["dies"]
    assert "[rank 1] build: no answer" in errors["hangs"] and "in hangs" in errors["hangs"]
    assert errors["ddp"] is None and len(result(measured, "ddp", Policy.REPLICATED)["steps_s"]) == 2
    assert "raises FAILED" in done.stderr
    assert "| raises | failed |" in done.stdout


@pytest.mark.slow
def test_systems_that_do_not_compute_the_same_are_no_success(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    done, measured = compared(script, tmp_path, "--systems", "forgets_to_reduce,ddp")
    assert done.returncode == 1
    assert "NOT WITHIN" in done.stdout
    assert all(r["error"] is None for r in measured["results"])


def tensor(elements: int, itemsize: int = 4) -> list[Any]:
    return [1, 2, 0, elements, itemsize, "cpu"]


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "payload", "sent"),
    [
        ("c10d::_allgather_base_", [tensor(400), tensor(100), "<Object>", False], "all_gather", 1600, 1200),
        ("c10d::allgather_", [[[tensor(100)] * 4], [tensor(100)], "<Object>"], "all_gather", 1600, 1200),
        (
            "c10d::reduce_scatter_tensor_coalesced_",
            [[tensor(100, 2)], [tensor(400, 2)], "<Object>"],
            "reduce_scatter",
            800,
            600,
        ),
        ("c10d::allreduce_", [[tensor(300), tensor(100)], "<Object>", -1], "all_reduce", 1600, 2400),
        (
            "c10d::alltoall_base_",
            [tensor(60), tensor(400), "<Object>", [20, 10, 30, 0], [100, 50, 250, 0]],
            "all_to_all",
            1600,
            1400,  # all but its own 50 elements
        ),
        ("c10d::alltoall_base_", [tensor(400), tensor(400), "<Object>", [], []], "all_to_all", 1600, 1200),
        ("c10d::send", [[tensor(100)], "<Object>", 1, 0], "send", 400, 400),
        ("c10d::recv_", [[tensor(100)], "<Object>", 1, 0], "receive", 400, 0),
    ],
)
def test_bytes_are_read_from_a_collectives_tensors(
    name: str, arguments: list[Any], kind: str, payload: int, sent: float
) -> None:
    node = {"name": name, "inputs": {"values": arguments}}
    other = {"name": "aten::add", "inputs": {"values": [tensor(1000)]}}
    found = count([node, other, node], world_size=4, rank=1)
    assert list(found) == [kind]
    assert (found[kind].calls, found[kind].payload_bytes, found[kind].sent_bytes) == (
        2,
        2 * payload,
        2 * sent,
    )
