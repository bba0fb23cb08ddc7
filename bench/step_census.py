"""The census of a profiled step of ours: what ``passes/census.py`` counts in its graphs, seen from outside.

Each collective, and each copy that is part of one, is an event below an operator of ours, which names its unit. Any
other copy belongs to the collective that its communication memory was last used by, or is used by next. A buffer is
memory that was allocated in the step, and that one of these operators takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from copies import OURS, Form, Profile, Where
from inductor_kernels import Kernel

from vescale_compile.passes.context import Part
from vescale_compile.passes.summary import Direction, Entry, Kind

Key = tuple[Part, Kind, Direction, str]
"""The last is the name of a unit."""

_SENDS = {Direction.GATHER: Kind.ALL_GATHER, Direction.REDUCE: Kind.REDUCE_SCATTER}
_OTHERS = {"all_gather": Kind.ALL_GATHER, "reduce_scatter": Kind.REDUCE_SCATTER, "all_reduce": Kind.ALL_REDUCE}
_FORMS = {Form.COPY: Kind.COPY, Form.COPY_IN: Kind.COPY_IN, Form.CAST: Kind.CAST}
_JOINS = ("aten::cat", "aten::_chunk_cat")


def of_graphs(entries: Mapping[Part, Iterable[Entry]]) -> Counter[Key]:
    """Bytes that the final graphs of a step move or allocate."""
    found: Counter[Key] = Counter()
    for part, each in entries.items():
        for entry in each:
            found[part, entry.kind, entry.direction, entry.unit] += entry.nbytes
    return +found


def of_step(
    events: Iterable[Any], kernels: Mapping[str, Kernel], units: Sequence[str], world_size: int
) -> Counter[Key]:
    """Bytes that a profiled forward and backward have moved or allocated.

    Args:
        events: roots of the profile's event tree, recorded with shapes and memory.
        kernels: what Inductor's kernels do, by the name of their events.
        units: their names, in the order of the graph.
        world_size: how many ranks a unit is sharded over.
    """
    profile = Profile(events, kernels)
    found: Counter[Key] = Counter()
    sent: Counter[Key] = Counter()
    for name, nbytes, where in profile.collectives:
        if name == "send":
            sent[_key(_SENDS[_direction(where)], where, where, units)] += nbytes
        elif name in _OTHERS:
            found[_key(_OTHERS[name], where, where, units)] += nbytes
    for key, nbytes in sent.items():
        found[key] += nbytes * world_size // (world_size - 1)  # with this rank's own part
    for copy, form, use in profile.communicated():
        kind = Kind.CONCATENATION if copy.operator in _JOINS else _FORMS[form]
        of_unit = copy.where if _names_unit(copy.where) else use.where
        found[_key(kind, copy.where, of_unit, units)] += copy.bytes
    for storage, where in profile.taken.items():
        if storage in profile.sizes and _names_unit(where):
            found[_key(Kind.BUFFER, where, where, units)] += profile.sizes[storage]
    return found


def _key(kind: Kind, where: Where, of_unit: Where, units: Sequence[str]) -> Key:
    """Of what happens at one place, for the unit that the operator of another names."""
    unit = next(value for value in of_unit.operator.typed[1].inputs if isinstance(value, int))
    # What the forward carries over is the backward's gather.
    carried = where.operator is not None and where.operator.name.startswith(f"{OURS}carry_all_gather")
    part = Part.BACKWARD if where.backward or carried else Part.FORWARD
    return part, kind, _direction(of_unit), units[unit]


def _direction(where: Where) -> Direction:
    return Direction.REDUCE if "reduce" in where.operator.name or "cast" in where.operator.name else Direction.GATHER


def _names_unit(where: Where) -> bool:
    return where.operator is not None and not where.operator.name.endswith("_into")
