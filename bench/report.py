"""The benchmark's report: Markdown tables, and how far the systems' results are apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from harness import Result
from systems import OURS, SYSTEMS
from workload import Policy

MB = 1e6
LOSSES, NORMS = "losses after the timed steps", "gradient norms of the first step"
"""What systems are compared by"""
HEADINGS = (
    "system",
    "step ms",
    "min to max",
    "÷ {ours}",
    "CPU ms",
    "peak MB",
    "steps MB",
    "tensors MB",
    "planned MB",
    "copied MB",
    "copy-in MB",
    "cast MB",
    "sent MB",
    "collectives",
    "kernels",
    "compile s",
    "warm s",
    "final loss",
    "gradient norm",
)
LEGEND = """\
Step: median over the timed steps, each from the first rank's start to the last one's end, and each after one that is
not timed, which finds the processor's caches full of what the other systems have computed; ÷: that, over ours; CPU:
median CPU time of a rank. Peak: memory of the fullest rank above its baseline before the model was built, compilation
included, on a GPU what PyTorch's allocator has reserved; steps: that of the timed steps alone. Of one profiled step of
rank 0: tensors at its fullest moment, parameters and optimizer states among them (planned: what the system promised
before the first step, and the states); bytes that copies write from or to memory that collectives use, and apart from
them copy-ins and casts. A copy-in is of a rank's own shard, to its place in the buffer that the other ranks' are
gathered into: every all-gather has to bring it there, and where the library's does, none is seen. Sent: what a rank
must send at least; collectives: AG all-gathers, RS reduce-scatters, AR all-reduces, or the sends of one made of
messages; kernels launched on a GPU. Compile: what the warm-up took longer than as many steps, the median of all starts
with empty caches; warm: the same of starts with the caches filled. Final loss: after the same number of steps on the
same data. Gradient norm: of the first step. * marks the fastest configuration of one system."""
SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "send": "sends"}
SECTIONS = {
    Policy.REPLICATED: ("Unsharded (every rank holds all parameters)", Policy.KEEP),
    Policy.RESHARD: ("Reshard (parameters gathered again in backward)", Policy.RESHARD),
    Policy.KEEP: ("Keep (parameters gathered once a step)", Policy.KEEP),
}
"""Title, and the policy of ours that a section is compared with: unsharded parameters are as good as kept."""


def tables(results: Sequence[Result]) -> str:
    """One table for each policy there are results of, and the legend."""
    parts = []
    for policy, (title, compared_with) in SECTIONS.items():
        section = [result for result in results if result.policy is policy]
        if not section:
            continue
        ours = _ours(results, compared_with)
        name = OURS if compared_with is policy else f"{OURS} {compared_with}"
        headings = [heading.format(ours=name) for heading in HEADINGS]
        parts += [f"**{title}**", "", *header(headings)]
        fastest = fastest_of_families(section)
        parts += [row(_cells(result, ours, result in fastest)) for result in section]
        parts.append("")
    missing = _left_out(results)
    counts = [f"Not measured, and may be the one that counts: {', '.join(missing)}."] if missing else []
    return "\n".join([*parts, LEGEND, *counts, ""])


def _left_out(results: Sequence[Result]) -> list[str]:
    """Configurations of measured families that were not run."""
    measured = {result.system for result in results}
    families = {SYSTEMS[name].family for name in measured} - {None}
    return [name for name, system in SYSTEMS.items() if system.family in families and name not in measured]


def disagreement(results: Sequence[Result]) -> dict[str, float]:
    """Largest difference between any two systems that finished, over the largest value: of losses and of norms.

    Systems that don't reduce gradients, or round what they send, are left out. NaN where a value is infinite or none at
    all; empty with fewer than two systems.
    """
    exact = {name for name, system in SYSTEMS.items() if system.reduces and not system.rounds}
    finished = [result for result in results if result.error is None and result.system in exact]
    if len(finished) < 2:
        return {}
    columns = {
        LOSSES: [result.final_loss for result in finished],
        NORMS: [result.gradient_norm for result in finished],
    }
    return {what: _spread([value for value in values if value is not None]) for what, values in columns.items()}


def _spread(values: Sequence[float]) -> float:
    if not all(math.isfinite(value) for value in values):
        return math.nan
    largest = max(abs(value) for value in values)
    return (max(values) - min(values)) / largest if largest else 0.0


def _ours(results: Sequence[Result], policy: Policy) -> Result | None:
    return next((r for r in results if r.system == OURS and r.policy is policy and r.error is None), None)


def fastest_of_families(section: Sequence[Result]) -> list[Result]:
    """Of each family with several configurations in a section, the one that counts."""
    families: dict[str, list[Result]] = {}
    for result in section:
        family = SYSTEMS[result.system].family
        if family is not None and result.error is None:
            families.setdefault(family, []).append(result)
    return [min(members, key=lambda result: result.median_s) for members in families.values() if len(members) > 1]


def _cells(result: Result, ours: Result | None, fastest: bool) -> list[str]:
    if result.error is not None or result.profile is None:
        return [result.system, "failed", *["-"] * (len(HEADINGS) - 2)]
    profile, traffic = result.profile, result.profile.collectives
    return [
        result.system + (" *" if fastest else ""),
        f"{1e3 * result.median_s:.0f}",
        f"{1e3 * min(result.steps_s):.0f} to {1e3 * max(result.steps_s):.0f}",
        f"{result.median_s / ours.median_s:.2f}" if ours is not None else "-",
        f"{1e3 * statistics.median(result.steps_cpu_s):.0f}",
        f"{result.peak_bytes / MB:.0f}",
        f"{max(memory.peak_of_steps - memory.baseline for memory in result.memory) / MB:.0f}",
        f"{profile.tensor_peak / MB:.0f}",
        "-" if result.planned_bytes is None else f"{result.planned_bytes / MB:.0f}",
        _moved(profile.copies.copied_bytes),
        _moved(profile.copies.copy_in_bytes),
        _moved(profile.copies.cast_bytes),
        f"{sum(kind.sent_bytes for kind in traffic.values()) / MB:.1f}",
        " + ".join(f"{traffic[kind].calls} {SHORT.get(kind, kind)}" for kind in traffic if kind != "receive") or "none",
        "-" if profile.device_kernels is None else str(profile.device_kernels),
        f"{result.compile_s:.1f}",
        f"{result.warm_compile_s:.1f}",
        f"{result.final_loss:.6f}",
        f"{result.gradient_norm:.5f}",
    ]


def _moved(nbytes: int) -> str:
    """Megabytes; only what is none reads 0."""
    return f"{nbytes / MB:.1f}" if not 0 < nbytes < MB / 20 else "< 0.1"


def header(headings: Sequence[str]) -> list[str]:
    """The first lines of a Markdown table: a column of names, and figures."""
    return [row(headings), row(["---", *["---:"] * (len(headings) - 1)])]


def row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
