"""The benchmark's command line: what it refuses, what it skips, what it takes for default."""

import importlib.util
import sys
from pathlib import Path

import pytest
from scripts import run_script

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import compare
import wire
from harness import Plan, Result
from systems import SYSTEMS
from workload import Policy, Workload

BENCH = Path(compare.__file__).parent


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, list[tuple[str, Policy]], list[Plan]]:
    """The exit status of a run that measures nothing, and what it would have measured."""
    contenders: list[tuple[str, Policy]] = []
    plans: list[Plan] = []

    def measure(chosen: list[tuple[str, Policy]], workload: Workload, plan: Plan, say: object) -> list[Result]:
        contenders.extend(chosen)
        plans.append(plan)
        return []

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "end_as_interrupted", lambda: None)
    monkeypatch.setattr(sys, "argv", ["compare.py", *options])
    return compare.main(), contenders, plans


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--systems", "fsdp3"), "no system fsdp3; there are"),
        (("--policies", "shard"), "no policy shard; there are unsharded, reshard, keep"),
        (("--systems", "ddp", "--policies", "keep"), "none of ddp runs under them"),
        (("--ranks", "0"), "0 is not a positive number"),
        (("--wire", "2gb"), "2gb is not a rate in bits per second"),
        (("--wire", "2gbit", "--ranks", "1"), "--wire: needs at least 2 --ranks"),
        (("--wire", "2gbit", "--world", "8"), "--world with --wire"),
        (("--world", "8", "--systems", "fsdp2,ddp"), "ddp can't run where collectives send nothing"),
        (("--json", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
        (("--chart", "/nowhere/at/all.png"), "there is no folder /nowhere/at"),
        (("--chart", "all.jpeg2000"), "the name must end in .png, .svg, .pdf"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "option"), [("planner.py", "--repeats"), ("timeline.py", "--seq")], ids=["planner", "timeline"]
)
def test_a_count_of_none_is_refused(program: str, option: str) -> None:
    ended = run_script(BENCH / program, option, "0", deadline_s=100)
    assert ended.returncode == 2 and "0 is not a positive number" in ended.stderr


def test_where_matplotlib_is_missing_the_timeline_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "timeline", raising=False)
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.axes"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(sys, "argv", ["timeline.py", "--out", "a.png"])
    timeline = importlib.import_module("timeline")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        timeline.main()
    assert "--out: needs matplotlib; pip install" in capsys.readouterr().err


def test_without_the_means_for_a_wire_the_run_is_skipped_with_a_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wire.os, "geteuid", lambda: 1000)
    status, contenders, _ = run(monkeypatch, "--wire", "2gbit")
    assert (status, contenders) == (0, [])
    assert capsys.readouterr().out == "Skipped, --wire 2gbit: network namespaces need root.\n"


def test_every_system_under_every_policy_is_measured_unless_it_must_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, contenders, _ = run(monkeypatch)
    expected = [(name, policy) for name, system in SYSTEMS.items() for policy in system.policies if system.default]
    assert contenders == expected
    assert ("vescale", Policy.KEEP) in contenders and ("vescale-eager-lowering", Policy.KEEP) not in contenders


def test_policies_choose_among_the_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    _, contenders, _ = run(monkeypatch, "--systems", "ddp,fsdp2", "--policies", "unsharded,keep")
    assert contenders == [("ddp", Policy.REPLICATED), ("fsdp2", Policy.KEEP)]


def test_a_world_of_collectives_that_do_nothing_is_one_process_and_leaves_ddp_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, contenders, (plan,) = run(monkeypatch, "--world", "64")
    assert (plan.ranks, plan.fake_world) == (1, 64)
    assert not any(name.startswith("ddp") for name, _ in contenders)
