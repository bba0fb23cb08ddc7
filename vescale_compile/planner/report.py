"""A planned model as figures: a row for each kind of unit, their total, and what other systems would pad."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vescale_compile.planner.baselines import fsdp2_padding, megatron_fsdp_padding
from vescale_compile.planner.plan import UnitPlan
from vescale_compile.planner.remedies import Remedy, remedies
from vescale_compile.planner.spec import TensorSpec
from vescale_compile.planner.unit import plan_unit
from vescale_compile.quantities import in_columns

WORTH_A_REMEDY = 3.0
"""Padding in per cent above which a unit's row comes with remedies."""


@dataclass(frozen=True)
class UnitRow:
    """``count`` units of equal content, or the total of a model.

    Sizes are those of one unit (of all units in a total), summed over its buffers and in elements; shares are
    in per cent of the tensors' elements.

    Args:
        name: the first such unit.
        count: how many there are.
        numel: of the tensors.
        buffers: how many.
        shard_numel: S.
        lower_bound: proven bound on S for these buffers.
        padding_percent: what belongs to no tensor.
        one_buffer_percent: no layout in one buffer for each itemsize pads less (proven).
        any_split_percent: no layout in any number of buffers pads less (proven).
        fsdp2_percent: what FSDP2's rule pads.
        megatron_percent: what Megatron-FSDP's rule pads, at least.
        remedies: what would help, if padding is high.
    """

    name: str
    count: int
    numel: int
    buffers: int
    shard_numel: int
    lower_bound: int
    padding_percent: float
    one_buffer_percent: float
    any_split_percent: float
    fsdp2_percent: float
    megatron_percent: float
    remedies: tuple[Remedy, ...] = ()

    @property
    def gap_percent(self) -> float:
        """How far S lies above its proven bound, in per cent of the bound."""
        return 100 * (self.shard_numel / self.lower_bound - 1)


@dataclass(frozen=True)
class ModelReport:
    """A model planned for ``world_size`` ranks.

    Args:
        rows: one for each kind of unit.
        plans: every unit's plan, by the unit's name.
        seconds: what ``plan_unit`` took for all units.
    """

    world_size: int
    rows: tuple[UnitRow, ...]
    plans: Mapping[str, UnitPlan]
    seconds: float

    @property
    def total(self) -> UnitRow:
        """The whole model; its shares are means over the units, weighted by elements."""
        numel = self._sum("numel")
        return UnitRow(
            name="total",
            count=sum(row.count for row in self.rows),
            numel=numel,
            buffers=self._sum("buffers"),
            shard_numel=self._sum("shard_numel"),
            lower_bound=self._sum("lower_bound"),
            **{
                share: sum(row.count * row.numel * getattr(row, share) for row in self.rows) / numel
                for share in UnitRow.__annotations__
                if share.endswith("_percent")
            },
        )

    def _sum(self, size: str) -> int:
        return sum(row.count * getattr(row, size) for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON types."""
        return {
            "world_size": self.world_size,
            "planning_seconds": self.seconds,
            "units": [asdict(row) | {"gap_percent": row.gap_percent} for row in self.rows],
            "total": asdict(self.total) | {"gap_percent": self.total.gap_percent},
        }

    def __str__(self) -> str:
        return "\n".join([table([*self.rows, self.total]), *(_advice(row) for row in self.rows if row.remedies)])


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
        share = 100 / plan.numel
        helpful = (
            remedies(
                tensors,
                world_size,
                alignment_bytes=alignment_bytes,
                keep_order=keep_order,
                alike=len(names),
            )
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
                lower_bound=plan.lower_bound,
                padding_percent=plan.padding_percent,
                one_buffer_percent=share * (plan.joint_lower_bound * world_size - plan.numel),
                any_split_percent=share * (plan.split_lower_bound * world_size - plan.numel),
                fsdp2_percent=share * fsdp2_padding(tensors, world_size),
                megatron_percent=share * megatron_fsdp_padding(tensors, world_size),
                remedies=tuple(helpful),
            )
        )
    return ModelReport(world_size, tuple(rows), plans, seconds)


COLUMNS = {
    "unit": "{0.name}",
    "x": "{0.count}",
    "elements": "{0.numel:,}",
    "buffers": "{0.buffers}",
    "S": "{0.shard_numel:,}",
    "bound on S": "{0.lower_bound:,}",
    "gap": "{0.gap_percent:.3f} %",
    "padding": "{0.padding_percent:.2f} %",
    "1 buffer >=": "{0.one_buffer_percent:.2f} %",
    "any split >=": "{0.any_split_percent:.2f} %",
    "FSDP2": "{0.fsdp2_percent:.2f} %",
    "Megatron >=": "{0.megatron_percent:.2f} %",
}


def table(rows: Iterable[UnitRow]) -> str:
    """The rows as text under headings; the last one, the total, below a rule."""
    lines = [list(COLUMNS), *([cell.format(row) for cell in COLUMNS.values()] for row in rows)]
    text = in_columns(lines)
    return "\n".join([*text[:-1], "-" * len(text[0]), text[-1]])


def _advice(row: UnitRow) -> str:
    lines = [f"{row.name}: what would help against {row.padding_percent:.2f} % padding", *row.remedies]
    return "\n  ".join(map(str, lines))
