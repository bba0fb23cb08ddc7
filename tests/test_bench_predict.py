"""`python bench/predict.py` and the picture of timelines: their arithmetic, and one cell over a wire."""

import json
import sys
from pathlib import Path

import pytest
from scripts import BENCH, run_script

sys.path.append(str(BENCH))

from forecaster import Forecast
from predict import Cell, Setting, cluster_of, gigabits, table
from timeline import Lane, awake_spans, busy_spans, clipped, draw, median, predicted
from wire import what_is_missing

from vescale_compile.cost import Device, MeasuredCollective, collective_cost
from vescale_compile.passes.prediction import Prediction, Span

possible = pytest.mark.skipif(what_is_missing() is not None, reason=f"no wire here: {what_is_missing()}")
DEVICE = Device("cpu", {"float32": 1e11}, 1e10, None, 1.0, 1.0, 1e-6, {"aten.mm()": 0.5})
FORWARD = Prediction(1.0, 0.6, 0.9, 0.3, 0.1, 0.9, (Span("a", 0.0, 0.7),), (Span("gather", 0.1, 1.0),))
BACKWARD = Prediction(2.0, 1.2, 1.8, 0.6, 0.2, 1.8, (Span("b", 0.0, 1.5),), (Span("reduce", 0.5, 2.0),), tail=0.5)
FORECAST = Forecast(10, FORWARD, BACKWARD, 1.0)

# What is measured is not the point, nor how deep the model: a size that compiles fast, with a little less to
# communicate than the smallest of the script's own, and short calibrations. Ranks import the main script too.
ONE_LAYER = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import predict
from vescale_compile.cost import calibrate_collectives, operators
from vescale_compile.examples.llama import LlamaConfig

predict.FOUR_LAYERS["one"] = LlamaConfig(layers=1, dim=512, heads=8, kv_heads=4)
calibrate_collectives._MOST = 5
operators._BUDGET_S = 0.05

if __name__ == "__main__":
    sys.exit(predict.main())
"""


@pytest.mark.parametrize(("rate", "expected"), [("2gbit", 2.0), ("500mbit", 0.5), ("1.5Gbit", 1.5), ("1000bit", 1e-6)])
def test_rates_are_read_as_gigabits(rate: str, expected: float) -> None:
    assert gigabits(rate) == pytest.approx(expected)


def test_a_cell_adds_up_both_graphs_and_the_optimizer_which_begins_before_the_last_reductions_end() -> None:
    cell = Cell.of(Setting("3M", "1gbit", 2), FORECAST, [5.0, 2.8, 3.0])
    assert (cell.predicted, cell.measured) == (pytest.approx(3.5), 3.0)
    assert cell.error == pytest.approx(1 / 6)
    assert (cell.compute, cell.exposed, cell.slowdown) == (pytest.approx(1.8), pytest.approx(0.9), pytest.approx(0.3))


def test_the_table_has_a_line_for_each_cell_and_counts_those_on_target() -> None:
    cells = [Cell.of(Setting("3M", rate, 2), FORECAST, [seconds]) for rate, seconds in (("5gbit", 9.0), ("1gbit", 3.4))]
    lines = table(cells).splitlines()
    assert lines[2].startswith("| 3M | 1gbit | 2 | 3500 | 3400 | +2.9 % |")
    assert lines[3].startswith("| 3M | 5gbit | 2 | 3500 | 9000 | -61.1 % |")
    assert lines[-1] == "1 of 2 cells are within 15 %."


def test_hosts_that_share_a_core_have_a_slower_device() -> None:
    measured = {"all_gather": MeasuredCollective(0.1, 1e8, 0.3)}
    alone, shared = (cluster_of(DEVICE, 4, "1gbit", measured, contending) for contending in (1.0, 2.0))
    assert alone.device == DEVICE
    assert shared.device.seconds(1e9, 0, "float32") == pytest.approx(2 * DEVICE.seconds(1e9, 0, "float32"))
    assert shared.device.operators == {"aten.mm()": 1.0}
    costs = [collective_cost(cluster, "all_gather", 1e6) for cluster in (alone, shared)]
    assert costs[0] == costs[1]


def test_a_wire_is_busy_between_samples_that_moved_enough() -> None:
    samples = [(0.0, 0), (1.0, 5), (2.0, 105), (3.0, 205), (4.0, 205), (5.0, 305)]
    assert busy_spans(samples, 50) == [(1.0, 3.0), (4.0, 5.0)]


def test_a_thread_is_awake_up_to_samples_that_find_it_running() -> None:
    states = [(0.0, "S"), (1.0, "R"), (2.0, "R"), (3.0, "S"), (4.0, "D"), (5.0, "R")]
    assert awake_spans(states) == [(0.0, 2.0), (4.0, 5.0)]


def test_what_lies_outside_the_step_is_clipped() -> None:
    assert clipped([(0.0, 1.5), (2.0, 5.0), (6.0, 7.0)], 1.0, 4.0) == [(0.0, 0.5), (1.0, 3.0)]


def test_the_predicted_lane_is_forward_backward_optimizer() -> None:
    lane = predicted(FORECAST)
    assert lane.computation == [(0.0, 0.7), (1.0, 2.5)]
    assert lane.wire == [(0.1, 1.0), (1.5, 3.0)]
    assert lane.optimizer == [(2.5, 3.5)]
    assert lane.seconds == pytest.approx(3.5)


def test_of_several_steps_the_one_of_median_duration_is_drawn() -> None:
    lanes = [Lane("ours", seconds, [], []) for seconds in (3.0, 1.0, 9.0, 2.0)]
    assert median(lanes[:3]).seconds == 3.0
    assert median(lanes).seconds == 2.0


def test_what_is_hidden_is_the_share_of_the_shorter_that_lies_beneath_the_longer() -> None:
    lane = Lane("ours", 10.0, [(0.0, 1.0), (2.0, 4.0)], [(0.5, 3.0), (3.5, 9.0)], optimizer=[(9.0, 10.0)])
    assert lane.hidden == pytest.approx((0.5 + 1.0 + 0.5) / 4.0)
    assert Lane("apart", 2.0, [(0.0, 1.0)], [(1.0, 2.0)]).hidden == 0.0
    assert Lane("nothing on the wire", 2.0, [(0.0, 2.0)], []).hidden == 1.0
    assert Lane("twice on the wire", 3.0, [(0.0, 2.0)], [(1.0, 3.0), (0.5, 2.5)]).hidden == 0.75


def test_what_is_not_waited_for_lies_beneath_all_that_the_main_thread_does() -> None:
    lane = Lane("ours", 10.0, [(1.0, 2.0)], [(0.0, 4.0)], awake=[(0.5, 3.0), (4.0, 9.0)])
    assert lane.hidden == 1.0
    assert lane.unwaited == pytest.approx(2.5 / 4.0)


def test_the_picture_has_a_panel_for_each_lane() -> None:
    figure = draw([predicted(FORECAST), Lane("fsdp2", 4.0, [(0.0, 1.0)], [(1.0, 2.0)])], "12M")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["vescale, predicted: 3500 ms", "fsdp2: 4000 ms"]


@possible
@pytest.mark.slow
def test_a_cell_is_predicted_measured_and_kept_for_the_next_run(tmp_path: Path) -> None:
    script, path = tmp_path / "one_layer.py", tmp_path / "cells.json"
    script.write_text(ONE_LAYER)
    one = ("--sizes", "one", "--rates", "2gbit", "--hosts", "2", "--steps", "3", "--seq", "8", "--json", str(path))
    done = run_script(script, *one, deadline_s=600)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(path.read_text())["cells"]
    assert (cell["size"], cell["rate"], cell["hosts"]) == ("one", "2gbit", 2)
    assert cell["predicted"] > cell["communication"] > 0.05 and len(cell["steps"]) == 3
    assert 0.2 < cell["predicted"] / cell["measured"] < 5
    again = run_script(script, *one, deadline_s=60)
    assert again.returncode == 0 and again.stdout == done.stdout and "measuring" not in again.stderr
