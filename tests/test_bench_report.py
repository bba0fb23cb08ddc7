"""The benchmark's tables and chart, from results that were not measured."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from chart import OURS_COLOR, chart, write_chart
from copies import Copies
from harness import Result
from matplotlib.colors import to_hex
from profiling import StepProfile
from report import disagreement, tables
from traffic import Traffic
from worker import Memory
from workload import Policy

MB = 10**6


def measured(
    system: str, policy: Policy = Policy.KEEP, seconds: float = 1.0, loss: float = 1.0, copied: int = 7 * MB
) -> Result:
    copies = Copies(copied_bytes=copied, copy_in_bytes=3 * MB, cast_bytes=2 * MB)
    return Result(
        system,
        policy,
        warmup_s=[seconds + 5],
        cold_warmups_s=[[seconds + 9], [seconds + 7]],
        warm_warmups_s=[[seconds + 9], [seconds + 2], [seconds + 1]],
        steps_s=[seconds],
        steps_cpu_s=[seconds],
        final_loss=loss,
        gradient_norm=1.0,
        memory=[Memory(10 * MB, 60 * MB, 40 * MB), Memory(10 * MB, 50 * MB, 45 * MB)],
        profile=StepProfile({"all_gather": Traffic(3, 8 * MB, 4 * MB)}, copies, 20 * MB, 30 * MB, None),
    )


def rows(results: list[Result]) -> list[dict[str, str]]:
    """The tables' rows, by heading."""
    lines = [line.strip("|").split("|") for line in tables(results).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines if "---" not in line[0]]
    found, headings = [], cells[0]
    for line in cells:
        if line[0] == "system":
            headings = line
        else:
            found.append(dict(zip(headings, line, strict=True)))
    return found


def test_the_disagreement_is_the_largest_of_any_two_systems() -> None:
    results = [measured(name, loss=loss) for name, loss in (("ddp", 1.96), ("fsdp2", 2.0), ("vescale", 1.98))]
    assert disagreement(results) == {
        "losses after the timed steps": pytest.approx(0.02),
        "gradient norms of the first step": 0.0,
    }


@pytest.mark.parametrize("system", ["compute-alone", "vescale-int8"])
def test_a_system_that_does_not_reduce_gradients_or_rounds_them_is_not_compared(system: str) -> None:
    results = [measured(system, loss=3.0), measured("ddp"), measured("fsdp2")]
    assert set(disagreement(results).values()) == {0.0}


@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_not_a_number_disagrees_with_every_other(place: int) -> None:
    losses = [1.0, 1.0]
    losses[place] = math.nan
    differences = disagreement([measured("fsdp2", loss=losses[0]), measured("vescale", loss=losses[1])])
    assert math.isnan(differences["losses after the timed steps"])


def test_ratios_are_to_ours_under_the_same_policy() -> None:
    results = [
        measured("fsdp2", Policy.RESHARD, 3.0),
        measured("vescale", Policy.RESHARD, 2.0),
        measured("fsdp2", Policy.KEEP, 1.0),
        measured("vescale", Policy.KEEP, 4.0),
        measured("ddp", Policy.REPLICATED, 2.0),
    ]
    ratios = [
        (row["system"], heading, row[heading])
        for row in rows(results)
        for heading in row
        if heading.startswith("÷") and row["system"] != "vescale"
    ]
    assert ratios == [("ddp", "÷ vescale keep", "0.50"), ("fsdp2", "÷ vescale", "1.50"), ("fsdp2", "÷ vescale", "0.25")]


def test_the_fastest_configuration_of_a_system_is_marked_in_each_table() -> None:
    results = [
        measured("fsdp2", Policy.RESHARD, 1.0),
        measured("simplefsdp", Policy.RESHARD, 3.0),
        measured("simplefsdp-bucketed", Policy.RESHARD, 2.0),
        measured("simplefsdp", Policy.KEEP, 2.0),
        measured("simplefsdp-bucketed", Policy.KEEP, 3.0),
    ]
    marked = [row["system"] for row in rows(results)]
    assert marked == ["fsdp2", "simplefsdp", "simplefsdp-bucketed *", "simplefsdp *", "simplefsdp-bucketed"]


def test_a_configuration_that_may_be_the_fastest_and_was_not_run_is_named() -> None:
    alone = [measured("simplefsdp"), measured("vescale")]
    line = "Not measured, and may be the one that counts: simplefsdp-bucketed."
    assert line in tables(alone).splitlines()
    assert "Not measured" not in tables([*alone, measured("simplefsdp-bucketed")])


def test_figures_stand_in_their_columns() -> None:
    (row,) = rows([measured("fsdp2")])
    expected = {
        "step ms": "1000",
        "peak MB": "50",
        "steps MB": "35",
        "copied MB": "7.0",
        "copy-in MB": "3.0",
        "cast MB": "2.0",
        "sent MB": "4.0",
        "collectives": "3 AG",
        "kernels": "-",
        "compile s": "7.0",
        "warm s": "2.0",
    }
    assert {heading: row[heading] for heading in expected} == expected


@pytest.mark.parametrize(("copied", "shown"), [(0, "0.0"), (1, "< 0.1"), (49_999, "< 0.1"), (60_000, "0.1")])
def test_only_what_copies_nothing_is_said_to(copied: int, shown: str) -> None:
    (row,) = rows([measured("vescale", copied=copied)])
    assert row["copied MB"] == shown


def test_a_bar_for_each_system_has_the_length_of_its_figure(tmp_path: Path) -> None:
    results = [measured("fsdp2", seconds=2.0), measured("vescale", seconds=1.5), measured("ddp", Policy.REPLICATED)]
    results.append(Result("simplefsdp", Policy.KEEP, error="it failed"))
    panels = chart(results, "a setting").axes
    assert [[bar.get_width() for bar in panel.patches] for panel in panels] == [[1000], [50], [2000, 1500], [50, 50]]
    assert [to_hex(bar.get_facecolor()) == OURS_COLOR for bar in panels[2].patches] == [False, True]
    write_chart(tmp_path / "chart.png", results, "a setting")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
