"""``python -m vescale_compile doctor``: what it finds on a machine that is well, and on ones that are not."""

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_forked

from vescale_compile import checks, doctor_command
from vescale_compile.__main__ import main
from vescale_compile.checks import Finding, Verdict
from vescale_compile.cost import Calibration, Device, MeasuredCollective, calibrate_collectives

DEVICE = Device("this machine", {"float32": 1e11}, 1e10, None, 1.0, 1.0, 1e-6)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["doctor", *arguments])
    return status, *capsys.readouterr()


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every check but the last is fine, at once."""
    monkeypatch.setattr(doctor_command, "CHECKS", (lambda: checks.fine("Python", "3.11"),))


@pytest.mark.slow
def test_this_machine_is_ready(capsys):
    status, out, _ = doctor(capsys)
    assert status == 0, out
    assert out.endswith("ready\n")
    assert len(out.splitlines()) >= len(checks.CHECKS)


def test_a_note_is_no_failure(capsys, healthy):
    status, out, _ = doctor(capsys)
    assert status == 0
    assert "which is a guess" in out and "-> measure with doctor --calibrate FILE" in out


def test_what_is_broken_is_named_and_is_the_exit_status(capsys, monkeypatch):
    broken = (lambda: Finding("gears", Verdict.BROKEN, "stuck", "oil them"), lambda: checks.fine("Python", "3.11"))
    monkeypatch.setattr(doctor_command, "CHECKS", broken)
    status, out, _ = doctor(capsys)
    assert status == 1
    assert "BROKEN gears" in out and "-> oil them" in out
    assert out.endswith("not ready: gears\n")


def test_versions_that_nothing_was_tried_on_are_noted(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
    monkeypatch.setattr(sys, "version_info", (3, 19, 0))
    assert checks.torch_version().verdict is checks.python_version().verdict is Verdict.NOTE
    assert "2.11 to 2.13" in checks.torch_version().remedy


def test_a_backend_that_is_not_registered_is_broken(monkeypatch):
    assert checks.backend().verdict is Verdict.FINE
    monkeypatch.setattr(torch.compiler, "list_backends", list)
    found = checks.backend()
    assert found.verdict is Verdict.BROKEN and "pip install" in found.remedy


def test_no_compiler_is_broken(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = checks.compiler()
    assert found.verdict is Verdict.BROKEN and "g++" in found.remedy


@pytest.mark.parametrize("given", [None, "/no/such/compiler"])
def test_a_compiler_that_inductor_does_not_look_for_is_only_advised(monkeypatch, given):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang++" if name == "clang++" else None)
    if given is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", given)
    found = checks.compiler()
    assert (found.verdict, found.remedy) == (Verdict.BROKEN, "set CXX=clang++")


@pytest.mark.slow
def test_an_inductor_that_can_no_longer_compile_is_broken(monkeypatch, tmp_path):
    """Whatever is cached of the time when it could, which a test before this one saw."""
    only_says_its_version = tmp_path / "g++"
    only_says_its_version.write_text(
        f'#!/bin/sh\ncase "$1" in -v|--version) exec {shutil.which("g++")} "$1";; esac\nexit 1\n'
    )
    only_says_its_version.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = checks.inductor()
    assert found.verdict is Verdict.BROKEN and "exit status" in found.found


def test_caches_that_cannot_be_written_are_broken(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = checks.caches()
    assert found.verdict is Verdict.BROKEN and "TORCHINDUCTOR_CACHE_DIR" in found.remedy


def test_a_pytorch_without_gloo_is_broken_and_no_ranks_are_tried(monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert checks.communication().verdict is Verdict.BROKEN
    assert "not tried" in checks.exchange().found


@pytest.mark.slow
def test_ranks_that_cannot_reach_each_other_are_broken(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    found = checks.exchange()
    assert found.verdict is Verdict.BROKEN and "GLOO_SOCKET_IFNAME" in found.remedy


def test_a_check_that_hangs_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr(checks, "DEADLINE_S", 0.5)
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert checks._run([hanging, hanging], {}) == "no end within 0.5 s"


def test_a_gpu_that_pytorch_cannot_find_is_noted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "nvidia-smi" in checks.gpu().remedy


def test_more_threads_than_cores_are_noted(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    found = checks.threads()
    assert found.verdict is Verdict.NOTE and f"{len(os.sched_getaffinity(0))} / local ranks" in found.remedy


def test_a_preset_or_a_calibration_is_checked(capsys, healthy, tmp_path):
    Calibration(DEVICE, 4, {"all_gather": MeasuredCollective(1e-4, 1e9)}).save(tmp_path / "this.json")
    status, out, _ = doctor(capsys, "--cluster", str(tmp_path / "this.json"))
    assert status == 0 and "4 x this machine" in out and "collectives as measured" in out
    status, out, _ = doctor(capsys, "--cluster", "cray")
    assert status == 1 and "neither a preset" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--ranks", "2"), "--ranks goes with --calibrate alone"),
        (("--calibrate", "/no/such/folder/x.json"), "its folder does not exist"),
        (("--calibrate", "x.json", "--cluster", "h100"), "leave one of them out"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, arguments, problem):
    status, _, err = doctor(capsys, *arguments)
    assert status == 2 and problem in err


def test_no_ranks_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor(capsys, "--calibrate", "x.json", "--ranks", "0")
    assert "--ranks: 0 is not at least 1" in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused_before_any_is_started(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, _, err = doctor(capsys, "--calibrate", "x.json", "--ranks", "2")
    assert status == 2 and "2 ranks on 1 GPUs: each needs one of its own; start fewer" in err


SMALL = {"cpu": (1 << 14, 1 << 16)}


def measuring_few_times(arguments: tuple[str, ...]) -> int:
    with mock.patch.multiple(calibrate_collectives, _COLLECTIVE_BYTES=SMALL, _MOST=5, _BATCHES=1, _BATCH_BYTES=1 << 18):
        return main(arguments)


@pytest.mark.slow
def test_a_calibration_of_local_ranks_is_a_file_that_the_compiler_takes(tmp_path: Path) -> None:
    path = tmp_path / "this.json"
    arguments = ("doctor", "--calibrate", str(path), "--ranks", "2")
    done = run_forked(measuring_few_times, arguments, deadline_s=300)
    assert done.returncode == 0, done.stderr
    assert "GFLOP/s" in done.stdout and "all_gather" in done.stdout
    assert Calibration.load(path).ranks == 2
