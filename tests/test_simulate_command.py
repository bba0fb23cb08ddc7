"""The commands that predict: ``simulate``, and ``explain`` of ranks that are not there."""

import contextlib
import io
import json
import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from vescale_compile.__main__ import main
from vescale_compile.cost import DEVICES
from vescale_compile.examples.llama import SIZES
from vescale_compile.options import Options
from vescale_compile.quantities import least_text

pytestmark = pytest.mark.slow  # left out of `make test-fast`


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    return status, *capsys.readouterr()


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example has one, where how many it has makes no difference."""
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], layers=1))


class Printed(NamedTuple):
    """What a command returned and wrote of a published model."""

    status: int
    rows: list[dict[str, Any]]
    errors: str


def printed(*arguments: str) -> Printed:
    where = ("--model", "llama-3-70b", "--cluster", "h100", "--json")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        status = main(("simulate", *where, *arguments))
    return Printed(status, json.loads(out.getvalue())["budgets"], errors.getvalue())


@pytest.fixture(scope="module")
def budgeted() -> Printed:
    """Within two budgets that a device has memory for, and one that is more."""
    return printed("--world", "64", "--budget", "40GB", "70GB", "100GB")


@pytest.fixture(scope="module")
def budgeted_on_many() -> Printed:
    """Within one budget in which no step fits, and two that one fits in."""
    return printed("--world", "1024", "--budget", "12GB", "35GB", "70GB")


def test_the_command_simulates_a_published_model_for_several_budgets(budgeted):
    tight, roomy, _ = budgeted.rows
    assert budgeted.status == 0
    assert roomy["step"] <= tight["step"] and roomy["kept"] >= tight["kept"]
    states = 8 * 70.55e9 / 64
    for row, budget in ((tight, 40e9), (roomy, 70e9)):
        assert row["least"] <= row["step"] and row["peak"] <= budget + states * 1.01


@pytest.mark.parametrize(("model", "world", "replicas"), [("gpt-oss-120b", 1024, 16), ("tiny", 16, 2)])
def test_ranks_of_replicas_gather_from_fewer(capsys, one_layer, model, world, replicas):
    where = ("--model", model, "--world", str(world), "--cluster", "h100", "--seq", "16", "--json")
    _, out, _ = command(capsys, "simulate", *where, "--replicas", "1", str(replicas))
    alone, replica = json.loads(out)["budgets"]
    assert replica["compute"] == alone["compute"]
    assert replica["communication"] < alone["communication"]


def test_the_command_simulates_the_example(capsys, one_layer):
    size = ("--model", "tiny", "--world", "8", "--cluster", "h100", "--seq", "16", "--replicas", "4")
    status, out, _ = command(capsys, "simulate", *size)
    assert status == 0
    assert "tiny, 1 x 16 tokens a rank, on 8 x h100" in out and "lower bound" in out
    assert re.search(r"^4 .*-$", out, re.MULTILINE)
    assert "would not run" not in out


def test_the_command_names_the_replicas_that_do_not_fit(capsys):
    where = ("simulate", "--model", "gpt-oss-120b", "--world", "64", "--cluster", "h100")
    status, out, err = command(capsys, *where, "--replicas", "1", "32")
    assert status == 1 and re.search(r"^1 ", out, re.MULTILINE)
    assert err.startswith("simulate: --replicas 32: a device has 84.9 GB, but a step needs at least")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--model", "llama-3-70b", "--world", "64", "--cluster", "cray"), "neither a preset"),
        (("--model", "llama-3-70b", "--world", "64", "--cluster", "h100", "--optim", "sgd"), "--optim is not for"),
        (("--model", "tiny", "--world", "8", "--cluster", "h100", "--budget", "much"), "--budget much: give bytes"),
        (("--model", "tiny", "--world", "8", "--cluster", "h100", "--replicas", "3"), "--replicas 3 does not divide"),
        (
            ("--model", "llama-3-70b", "--world", "8", "--cluster", "h100", "--replicas", "3"),
            "does not divide --world 8",
        ),
    ],
)
def test_the_command_refuses_options_that_make_no_sense(capsys, arguments, problem):
    status, _, err = command(capsys, "simulate", *arguments)
    assert status == 2
    assert problem in err


def test_a_published_model_takes_no_more_memory_than_makes_its_step_faster(budgeted_on_many):
    some, much = budgeted_on_many.rows
    assert much["step"] == pytest.approx(some["step"], rel=1e-3)
    assert much["peak"] < 35e9


def test_a_budget_in_which_nothing_fits_leaves_the_predictions_for_others(budgeted_on_many):
    assert budgeted_on_many.status == 1
    assert [row["budget"] for row in budgeted_on_many.rows] == [35 * 10**9, 70 * 10**9]
    assert "--budget is 12.0 GB, but a step needs at least" in budgeted_on_many.errors


def test_the_budget_that_the_command_asks_for_is_one_that_it_takes(capsys):
    where = ("simulate", "--model", "llama-3-70b", "--world", "64", "--cluster", "h100", "--seq", "64")
    status, _, err = command(capsys, *where, "--budget", "1GB")
    assert status == 1
    found = re.search(r"--budget is 1\.0 GB, but a step needs at least (([\d.]+)GB)", err)
    assert found is not None
    assert command(capsys, *where, "--budget", found[1])[0] == 0
    assert command(capsys, *where, "--budget", f"{float(found[2]) - 0.1:.1f}GB")[0] == 1


def test_the_budgets_that_the_compiler_asks_for_can_be_typed_back(capsys, one_layer):
    where = ("simulate", "--model", "tiny", "--world", "8", "--cluster", "h100", "--seq", "16")
    asked = ["1000"]
    while (told := command(capsys, *where, "--budget", asked[-1]))[0] != 0:
        assert told[0] == 1
        found = re.search(r"--budget is .* needs .*Give at least (\w+(\.\w+)?)", told[2])
        assert found is not None, told[2]
        assert found[1] not in asked
        asked.append(found[1])
    assert len(asked) > 1


def test_the_command_says_which_step_lacks_memory_of_the_device(capsys, one_layer, budgeted):
    assert [row["lacking"] for row in budgeted.rows] == [0, 0, 0]  # of which the table says nothing
    where = ("--model", "tiny", "--world", "8", "--batch", "100000", "--cluster", "h100")
    _, out, _ = command(capsys, "simulate", *where)
    assert len(re.findall(r"^--replicas 1: .* more than a device has: the step would not run$", out, re.M)) == 1


@pytest.mark.parametrize("nbytes", [999, 1000, 1001, 999_999, 12_340_000_001, 7_000_000_000_000])
def test_the_least_size_is_never_rounded_down(nbytes):
    budget = Options(memory_budget=least_text(nbytes)).budget_on(DEVICES["h100"], 0)
    assert budget is not None and nbytes <= budget <= 1.05 * nbytes + 100


def test_a_budget_may_be_a_share_of_the_devices_memory_with_the_optimizers_states():
    (row,) = printed("--world", "64", "--seq", "64", "--budget", "90%").rows
    assert row["budget"] == "90%"
    assert row["peak"] <= 0.9 * (DEVICES["h100"].memory_bytes or 0)


def test_a_share_of_the_devices_memory_may_be_the_budget_of_a_model_that_is_compiled(capsys, one_layer):
    where = ("--model", "tiny", "--world", "64", "--cluster", "h100", "--seq", "16", "--budget", "90%")
    status, out, _ = command(capsys, "simulate", *where)
    assert status == 0 and " 90% " in out


def test_without_a_budget_the_command_says_that_the_device_is_too_small(capsys):
    where = ("simulate", "--model", "llama-3-70b", "--world", "7", "--cluster", "h100")
    status, _, err = command(capsys, *where)
    assert status == 1
    assert "a device has 84.9 GB" in err and "More ranks" in err


def test_explain_shows_the_graphs_of_an_example_on_many_ranks(capsys):
    status, out, _ = command(capsys, "explain", "--model", "tiny", "--world", "16", "--seq", "16")
    assert status == 0
    for words in ("launch all_gather of layers.1", "backward:", "memory at most", "predicted", "on 16 x cpu"):
        assert words in out


def test_explains_help_says_what_it_predicts_for_without_a_cluster(capsys):
    with pytest.raises(SystemExit):
        main(("explain", "--help"))
    assert "(a guess for CPUs)" in " ".join(capsys.readouterr().out.split())
