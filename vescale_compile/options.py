"""Options of ``torch.compile(model, backend="vescale", options={...})``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .runtime.agreement import DEADLINE_S

LOWERINGS = ("inductor", "eager")


@dataclass(frozen=True)
class Options:
    """What a compilation can be asked.

    Attributes:
        lowering: ``"inductor"`` generates code; ``"eager"`` runs the graphs' operators one by one, for
            debugging and for bit-exact comparison with ``backend="aot_eager"``.
        deadline: seconds that a rank waits for the others' word that they compiled the same collectives.
    """

    lowering: str = "inductor"
    deadline: float = DEADLINE_S

    def __post_init__(self) -> None:
        if self.lowering not in LOWERINGS:
            raise ValueError(f"vescale option lowering={self.lowering!r}: choose one of {', '.join(LOWERINGS)}")
        if not isinstance(self.deadline, int | float) or self.deadline <= 0:
            raise ValueError(f"vescale option deadline={self.deadline!r}: give a number of seconds above 0")


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Reads ``options=`` of ``torch.compile``; raises ValueError for a name that does not exist."""
    known = {field.name for field in dataclasses.fields(Options)}
    if unknown := sorted(set(given or ()) - known):
        raise ValueError(f"unknown vescale options {unknown}: there are {', '.join(sorted(known))}")
    return Options(**(given or {}))
