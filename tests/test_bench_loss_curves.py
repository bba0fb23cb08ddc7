"""`python bench/loss_curves.py`: which runs it compares, what it draws, and a small run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure
from ranks import run_forked
from scripts import BENCH

sys.path.append(str(BENCH))

import loss_curves
from loss_curves import Curve, draw, largest_difference, pairs, table

SHARDED = Curve("muon", 2, [(1, 5.0), (5, 4.0)], 3.5, 20.0)
ALONE = Curve("muon", 1, [(1, 5.0), (5, 3.2)], 3.6, 10.0)
OTHER = Curve("adamw", 2, [(1, 5.5), (5, 5.0)], 4.9, 20.0)


def test_the_two_runs_of_an_optimizer_are_compared_at_every_step() -> None:
    assert pairs([OTHER, ALONE, SHARDED]) == [(SHARDED, ALONE)]
    assert largest_difference(SHARDED, ALONE) == pytest.approx(0.25)
    assert "| Muon | 4.0000 | 3.2000 | 2.5e-01 | 3.5000 | 20 | 10 |" in table([SHARDED, ALONE])


def test_curves_of_other_steps_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        largest_difference(SHARDED, Curve("muon", 1, [(1, 5.0)], 3.6, 10.0))


def test_a_line_is_several_ranks_and_dots_in_its_colour_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kwargs: (figures.append(figure), save(figure, *args, **kwargs))
    )
    draw(tmp_path / "curves.png", [SHARDED, ALONE], "a setting")
    line, dots, *_ = figures[0].axes[0].lines
    assert list(line.get_xydata().ravel()) == [1, 5, 5, 4] and line.get_linestyle() == "-"
    assert list(dots.get_xydata().ravel()) == [1, 5, 5, 3.2] and dots.get_marker() == "."
    assert line.get_color() == dots.get_color()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", "1"), "a single rank is what sharding ranks are compared with"),
        (("--optimizers", "lion"), "no optimizer lion; there are adamw, adamw8bit, muon, shampoo"),
        (("--picture", "curves.jpeg2000"), "the name must end in .png, .svg, .pdf"),
        (("--picture", "/nowhere/at/all.png"), "there is no folder /nowhere/at"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", *options])
    with pytest.raises(SystemExit) as ended:
        loss_curves.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def of_one_layer(arguments: tuple[str, ...]) -> int:
    """The command, whose tiny model has one."""
    from vescale_compile.__main__ import main
    from vescale_compile.examples.llama import SIZES

    SIZES["tiny"] = replace(SIZES["tiny"], layers=1)
    return main(arguments)


def run_where_pytorch_is_imported(command: list[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
    """In place of ``subprocess.run``."""
    assert command[:3] == [sys.executable, "-m", "vescale_compile"]
    return run_forked(of_one_layer, tuple(command[3:]), deadline_s=timeout)


@pytest.mark.slow
def test_both_runs_are_of_the_example_and_learn_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "curves.json"
    tiny = ("--model", "tiny", "--batch", "2", "--seq", "32", "--steps", "4", "--log-every", "1")
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", "--optimizers", "adamw", *tiny, "--json", str(written)])
    forking = SimpleNamespace(**vars(subprocess) | {"run": run_where_pytorch_is_imported})
    monkeypatch.setattr(loss_curves, "subprocess", forking)
    assert loss_curves.main() == 0
    sharded, alone = json.loads(written.read_text())["curves"]
    assert (sharded["ranks"], alone["ranks"]) == (2, 1)
    assert [step for step, _ in sharded["points"]] == [1, 2, 3, 4]
    losses = [[loss for _, loss in curve["points"]] for curve in (sharded, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]
