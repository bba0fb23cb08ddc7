"""The benchmark's bar chart: step time and peak memory of every system, one row of panels for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import MB, SECTIONS
from systems import OURS

OURS_COLOR, PEER_COLOR = "#c44e52", "#8c9bb5"
_BAR_INCHES = 0.34
_FRAME_INCHES = 0.9
_WIDTH_INCHES = 11.0


def chart(results: Sequence[Result], setting: str) -> Figure:
    """Draws the systems that finished, in the order given.

    Args:
        results: of one run.
        setting: what was run, for the title.
    """
    finished = [result for result in results if result.error is None]
    sections = {
        title: members
        for policy, (title, _) in SECTIONS.items()
        if (members := [result for result in finished if result.policy is policy])
    }
    heights = [_FRAME_INCHES + _BAR_INCHES * len(members) for members in sections.values()] or [_FRAME_INCHES]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + _FRAME_INCHES), layout="constrained")
    figure.suptitle(setting, fontsize=9)
    panels = figure.subplots(len(heights), 2, sharex="col", squeeze=False, height_ratios=heights)
    for (times, memories), (title, members) in zip(panels, sections.items(), strict=False):
        _bars(times, members, [1e3 * result.median_s for result in members])
        _bars(memories, members, [result.peak_bytes / MB for result in members])
        memories.tick_params(labelleft=False)
        times.set_title(title, loc="left", fontsize=9)
    panels[-1][0].set_xlabel("median step, ms")
    panels[-1][1].set_xlabel("peak memory of a rank above its baseline, MB")
    return figure


def write_chart(path: Path, results: Sequence[Result], setting: str) -> None:
    """Writes :func:`chart` as an image, of the kind that the file's ending names."""
    chart(results, setting).savefig(path, dpi=150)


def _bars(axes: Axes, results: Sequence[Result], values: Sequence[float]) -> None:
    colors = [OURS_COLOR if result.system == OURS else PEER_COLOR for result in results]
    bars = axes.barh([result.system for result in results], values, color=colors)
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(labelsize=8)
