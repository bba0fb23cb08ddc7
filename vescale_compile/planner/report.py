"""A planned model as figures: a row for each kind of unit, totals, and what other systems would pad."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vescale_compile.planner.baselines import fsdp2_padding, megatron_fsdp_padding
from vescale_compile.planner.plan import UnitPlan
from vescale_compile.planner.remedies import Remedy, remedies
from vescale_compile.planner.spec import TensorSpec
from vescale_compile.planner.unit import plan_unit

WORTH_A_REMEDY = 3.0
"""Padding in per cent above which a unit's row comes with remedies."""


@dataclass(frozen=True)
class UnitRow:
    """Units of equal content. Elements and S are those of one of them; padding is in per cent of elements.

    Args:
        name: the first such unit.
        count: how many there are.
        numel: elements of the tensors.
        buffers: buffers it is planned as.
        shard_numel: S, summed over its buffers.
        padding_numel: elements that belong to no tensor.
        padding_percent: the same, in per cent.
        lower_bound: proven bound on S for these buffers, summed.
        gap_percent: S above that bound.
        one_buffer_percent: the least padding that one buffer for each itemsize could have (proven).
        fsdp2_percent: padding of FSDP2's rule.
        megatron_percent: padding of Megatron-FSDP's rule, at least.
        remedies: what would help, if padding is high.
    """

    name: str
    count: int
    numel: int
    buffers: int
    shard_numel: int
    padding_numel: int
    padding_percent: float
    lower_bound: int
    gap_percent: float
    one_buffer_percent: float
    fsdp2_percent: float
    megatron_percent: float
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class ModelReport:
    """A model planned for ``world_size`` ranks. ``seconds`` is what ``plan_unit`` took for all units."""

    world_size: int
    rows: tuple[UnitRow, ...]
    plans: Mapping[str, UnitPlan]
    seconds: float

    @property
    def numel(self) -> int:
        """Elements of all units."""
        return sum(row.count * row.numel for row in self.rows)

    def percent(self, column: str) -> float:
        """The model's figure for one of ``UnitRow``'s padding columns: its mean, weighted by elements."""
        return sum(row.count * row.numel * getattr(row, column) for row in self.rows) / self.numel

    @property
    def shard_numel(self) -> int:
        """Elements of each rank."""
        return sum(row.count * row.shard_numel for row in self.rows)

    @property
    def lower_bound(self) -> int:
        """Sum of the proven bounds on the elements of each rank."""
        return sum(row.count * row.lower_bound for row in self.rows)

    @property
    def gap_percent(self) -> float:
        """Elements of each rank above that sum."""
        return 100 * (self.shard_numel / self.lower_bound - 1)

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON types."""
        return {
            "world_size": self.world_size,
            "numel": self.numel,
            "shard_numel": self.shard_numel,
            "padding_percent": self.percent("padding_percent"),
            "gap_percent": self.gap_percent,
            "fsdp2_percent": self.percent("fsdp2_percent"),
            "megatron_percent": self.percent("megatron_percent"),
            "planning_seconds": self.seconds,
            "units": [asdict(row) for row in self.rows],
        }


def report(
    units: Mapping[str, Sequence[TensorSpec]],
    world_size: int,
    *,
    alignment_bytes: int = 16,
    keep_order: bool = False,
    advise: bool = True,
) -> ModelReport:
    """Plans every unit and collects the figures; units of equal content share a row.

    Args:
        units: the tensors of each unit, by the unit's name.
        advise: look for remedies for units that pad more than ``WORTH_A_REMEDY`` per cent.

    The others are those of ``plan_unit``.
    """
    start = time.perf_counter()
    plans = {
        name: plan_unit(tensors, world_size, alignment_bytes=alignment_bytes, keep_order=keep_order)
        for name, tensors in units.items()
    }
    seconds = time.perf_counter() - start
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, tensors in units.items():
        alike.setdefault(tuple((t.shape, t.itemsize, t.granularity) for t in tensors), []).append(name)
    rows = []
    for names in alike.values():
        plan, tensors = plans[names[0]], units[names[0]]
        helpful = (
            remedies(tensors, world_size, alignment_bytes=alignment_bytes)
            if advise and plan.padding_percent > WORTH_A_REMEDY
            else ()
        )
        rows.append(
            UnitRow(
                name=names[0],
                count=len(names),
                numel=plan.numel,
                buffers=len(plan.buffers),
                shard_numel=plan.shard_numel,
                padding_numel=plan.padding_numel,
                padding_percent=plan.padding_percent,
                lower_bound=plan.lower_bound,
                gap_percent=100 * (plan.shard_numel / plan.lower_bound - 1),
                one_buffer_percent=100 * (plan.joint_lower_bound * world_size / plan.numel - 1),
                fsdp2_percent=100 * fsdp2_padding(tensors, world_size) / plan.numel,
                megatron_percent=100 * megatron_fsdp_padding(tensors, world_size) / plan.numel,
                remedies=tuple(helpful),
            )
        )
    return ModelReport(world_size, tuple(rows), plans, seconds)


HEADER = (
    "unit",
    "x",
    "elements",
    "buffers",
    "S",
    "padding",
    "bound on S",
    "gap",
    "1 buffer",
    "any split",
    "FSDP2",
    "Megatron",
)


def table(model: ModelReport) -> str:
    """The report as text: a table, totals, and remedies.

    ``1 buffer`` and ``any split`` are proven bounds: the least padding without a split, and with any.
    ``FSDP2`` and ``Megatron`` are what the rules of these systems pad.
    """
    lines = [HEADER]
    for row in model.rows:
        lines.append(
            (
                row.name,
                f"{row.count}",
                f"{row.numel:,}",
                f"{row.buffers}",
                f"{row.shard_numel:,}",
                f"{row.padding_percent:.2f} %",
                f"{row.lower_bound:,}",
                f"{row.gap_percent:.3f} %",
                f"{row.one_buffer_percent:.2f} %",
                f"{row.any_split_percent:.2f} %",
                f"{row.fsdp2_percent:.2f} %",
                f"{row.megatron_percent:.2f} %",
            )
        )
    lines.append(
        (
            "total",
            f"{sum(row.count for row in model.rows)}",
            f"{model.numel:,}",
            f"{sum(row.count * row.buffers for row in model.rows)}",
            f"{model.shard_numel:,}",
            f"{model.percent('padding_percent'):.2f} %",
            f"{model.lower_bound:,}",
            f"{model.gap_percent:.3f} %",
            f"{model.percent('one_buffer_percent'):.2f} %",
            f"{model.percent('any_split_percent'):.2f} %",
            f"{model.percent('fsdp2_percent'):.2f} %",
            f"{model.percent('megatron_percent'):.2f} %",
        )
    )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    text.insert(-1, "-" * len(text[0]))
    for row in model.rows:
        if row.remedies:
            text.append(f"{row.name}: what would help against {row.padding_percent:.2f} % padding")
            text += [f"  {remedy}" for remedy in row.remedies]
    return "\n".join(text)
