"""`python -m vescale_compile train`: under torchrun as a user runs it, else in processes that have imported PyTorch."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_command

from vescale_compile import train_command
from vescale_compile.examples.text import standard_library
from vescale_compile.examples.training import learning_rate

pytestmark = pytest.mark.slow  # left out of `make test-fast`

DEADLINE_S = 600
TINY = ("--model", "tiny", "--seq", "32", "--device", "cpu", "--threads", "1", "--sample", "8")
DDP = ("--backend", "eager", "--ddp")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(standard_library() / "json", tmp_path_factory.mktemp("text") / "json"))


def trained(text: Path, folder: Path, *options: str, torchrun: int = 0) -> dict[str, Any]:
    """The report of a run that must succeed; `torchrun` is its number of ranks, 0 for none."""
    report = folder / "report.json"
    arguments = ("train", "--text", str(text), *TINY, *options, "--json", str(report))
    done = run_command(*arguments, deadline_s=DEADLINE_S) if not torchrun else under_torchrun(torchrun, arguments)
    assert done.returncode == 0, done.stderr
    measured = json.loads(report.read_text())["report"]
    return measured | {"printed": done.stdout}


def under_torchrun(ranks: int, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, "-m", "vescale_compile", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def losses(report: dict[str, Any]) -> list[float]:
    return [loss for _, loss in report["curve"]]


@pytest.fixture(scope="module")
def two_ranks(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    options = ("--ranks", "2", "--batch", "4", "--steps", "30", "--log-every", "5")
    return trained(text, tmp_path_factory.mktemp("two"), *DDP, *options)


def test_the_loss_falls(two_ranks: dict[str, Any]) -> None:
    assert losses(two_ranks)[0] == pytest.approx(5.55, abs=0.1)  # log(256): nothing known yet
    assert losses(two_ranks)[-1] < 4.0
    assert two_ranks["validation_loss"] < 4.0


def test_the_report_holds_every_measurement(two_ranks: dict[str, Any]) -> None:
    assert [step for step, _ in two_ranks["curve"]] == [1, 5, 10, 15, 20, 25, 30]
    assert two_ranks["tokens_per_second"] > 0
    assert two_ranks["first_step_seconds"] > 0
    assert len(two_ranks["peak_memory_bytes"]) == 2
    assert min(two_ranks["peak_memory_bytes"]) > 2**26
    assert two_ranks["prompt"]
    assert len(two_ranks["sample"].encode("utf-8", errors="replace")) >= 8


def test_one_rank_prints(two_ranks: dict[str, Any]) -> None:
    assert len(re.findall("on unseen text", two_ranks["printed"])) == 1
    assert len(re.findall("30/30", two_ranks["printed"])) == 1


@pytest.mark.parametrize(
    "options",
    [("--ranks", "1", "--batch", "8"), ("--ranks", "1", "--batch", "2", "--accumulate", "4")],
    ids=["one batch", "accumulated"],
)
def test_one_rank_learns_what_two_ranks_learn(
    options: tuple[str, ...], two_ranks: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    report = trained(text, tmp_path, "--backend", "eager", *options, "--steps", "30", "--log-every", "5")
    assert losses(report) == pytest.approx(losses(two_ranks), rel=1e-4)


SHORT = ("--layers", "1", "--batch", "2", "--seq", "12", "--steps", "12", "--log-every", "3")
SHARDED_AND_REPLICATED = ("--ranks", "2", *SHORT)


@pytest.fixture(scope="module")
def replicated(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    backend = ("--backend", "aot_eager", "--ddp")
    return trained(text, tmp_path_factory.mktemp("ddp"), *SHARDED_AND_REPLICATED, *backend)


@pytest.fixture(scope="module")
def sharded(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sharded")
    options = ("--lowering", "eager", "--dump", str(folder / "graphs"))
    return trained(text, folder, *SHARDED_AND_REPLICATED, *options) | {"dump": folder / "graphs"}


def test_a_sharded_model_learns_what_a_replicated_one_learns(
    sharded: dict[str, Any], replicated: dict[str, Any]
) -> None:
    assert losses(sharded) == pytest.approx(losses(replicated), rel=1e-6)
    assert sharded["validation_loss"] == pytest.approx(replicated["validation_loss"], rel=1e-6)


def test_torchrun_trains_as_local_processes_do(sharded: dict[str, Any], text: Path, tmp_path: Path) -> None:
    report = trained(text, tmp_path, *SHORT, "--lowering", "eager", torchrun=2)
    assert losses(report) == losses(sharded)
    assert report["sample"] == sharded["sample"]


def test_generated_code_learns_what_a_replicated_model_learns(
    replicated: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    report = trained(text, tmp_path, *SHARDED_AND_REPLICATED, "--lowering", "inductor")
    assert losses(report) == pytest.approx(losses(replicated), rel=1e-5)
    assert report["validation_loss"] == pytest.approx(replicated["validation_loss"], rel=1e-5)


def test_parameters_in_bf16_change_the_losses_by_rounding(
    replicated: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    options = (*SHARDED_AND_REPLICATED, "--lowering", "eager", "--param-dtype", "bf16")
    report = trained(text, tmp_path, *options)
    assert losses(report) == pytest.approx(losses(replicated), rel=1e-2)
    assert losses(report) != pytest.approx(losses(replicated), rel=1e-6)


def test_a_sharded_model_accumulates_as_a_replicated_one_does(text: Path, tmp_path: Path) -> None:
    options = (*SHARDED_AND_REPLICATED, "--steps", "6", "--accumulate", "2")
    sharded = trained(text, tmp_path, *options, "--lowering", "eager")
    replicated = trained(text, tmp_path, *options, *DDP)
    assert losses(sharded) == pytest.approx(losses(replicated), rel=1e-6)


def test_a_run_compiles_one_graph_to_train_and_one_for_unseen_text(sharded: dict[str, Any]) -> None:
    assert {path.name for path in (sharded["dump"] / "rank0").iterdir()} == {"compile0", "compile1"}


def test_graphs_are_dumped_for_every_rank_and_the_folder_is_printed(sharded: dict[str, Any]) -> None:
    assert f"graphs before and after each pass: {sharded['dump']}" in sharded["printed"]
    dumped = [{path.name for path in (sharded["dump"] / rank).rglob("*.py")} for rank in ("rank0", "rank1")]
    assert dumped[0]
    assert dumped[0] == dumped[1]


def test_time_ends_a_run(text: Path, tmp_path: Path) -> None:
    options = ("--ranks", "1", "--batch", "2", "--steps", "100000", "--seconds", "0.1", "--log-every", "2")
    report = trained(text, tmp_path, "--backend", "eager", *options)
    assert report["curve"][-1][0] < 100000


def test_a_text_too_short_ends_every_rank_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short for a batch")
    done = run_command("train", "--text", str(tmp_path), *TINY, *DDP, "--ranks", "2", deadline_s=DEADLINE_S)
    assert done.returncode == 1
    assert re.search(r"train: rank [01]: ValueError: rank [01]: the text has \d+ bytes", done.stderr)


def test_a_text_with_too_little_that_is_not_trained_on_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("enough to train on, but 2 % of it are no window. " * 100)
    options = ("--backend", "eager", "--ranks", "1", "--batch", "1", "--seq", "64", "--steps", "3")
    done = run_command("train", "--text", str(tmp_path), *TINY, *options, deadline_s=DEADLINE_S)
    assert done.returncode == 1
    assert "rank 0: the text has 98 bytes, and a batch of 1 windows of 64 bytes" in done.stderr
    assert "compiling" not in done.stdout


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train_command.add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ddp"], "--ddp is for comparison"),
        (["--backend", "inductor", "--ddp", "--lowering", "eager"], "--lowering is for --backend vescale"),
        (["--backend", "inductor", "--ddp", "--no-reshard"], "--reshard is for --backend vescale"),
        (
            ["--backend", "inductor", "--ddp", "--param-dtype", "bf16"],
            "--param-dtype is for --backend vescale",
        ),
        (["--backend", "inductor", "--ddp", "--dump", "x"], "--dump is for --backend vescale"),
        (["--backend", "inductor", "--ranks", "2"], "add --ddp, or run a single rank"),
        (["--sample", "0", "--prompt", "x"], "--sample 0 writes none"),
        (["--sample", "0", "--temperature", "1"], "--sample 0 writes none"),
        (["--sample", "-1"], "--sample is -1"),
        (["--prompt", ""], "--prompt is empty"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--text", "no/such/folder"], "--text no/such/folder is not a folder"),
        (["--json", "no/such/folder/report.json"], "its folder does not exist"),
        (["--heads", "3"], "over 3 heads"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_could_do_nothing_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert train_command.run(parse("--device", "cpu", *options)) == 2
    assert message in capsys.readouterr().err


def test_under_torchrun_the_number_of_ranks_is_not_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert train_command.run(parse("--device", "cpu", "--ranks", "4")) == 2
    assert "rank 3: --ranks: torchrun decides" in capsys.readouterr().err


def test_a_launcher_that_does_not_number_a_machines_ranks_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert train_command.run(parse("--device", "cpu")) == 2
    assert "rank 3: the environment has RANK and WORLD_SIZE, but not LOCAL_RANK" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps", "--batch", "--seq", "--ranks", "--accumulate", "--log-every"])
def test_counts_must_be_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(option, "0")
    assert f"{option}: 0 is not at least 1" in capsys.readouterr().err


def test_the_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 100) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[0] == pytest.approx(0.2)
    assert rates[4] == 1.0
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)
