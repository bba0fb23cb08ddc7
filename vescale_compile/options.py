"""Options of ``torch.compile(model, backend="vescale", options={...})``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cost import Cluster
from .quantities import bytes_in
from .runtime.agreement import DEADLINE_S

LOWERINGS = ("inductor", "eager")
_LONGEST_S = 1e7  # a season; PyTorch's stores take no infinite time


@dataclass(frozen=True)
class Options:
    """What a compilation can be asked.

    What compiling raises arrives as the ``inner_exception`` of a ``torch._dynamo.exc.BackendCompilerFailed``.

    Attributes:
        lowering: ``"inductor"`` generates code; ``"eager"`` runs the graphs' operators one by one, for
            debugging and for bit-exact comparison with ``backend="aot_eager"``.
        deadline: seconds that a rank waits for the others' word that they compiled the same collectives.
        memory_budget: bytes that a step may take on a rank, optimizer states apart: a number, or text such as
            ``"40GB"``. What it leaves is used to keep units for the backward that would be gathered again, and to
            launch ahead; where batches differ in size, the first decides what is kept. Compiling raises GraphError
            where no schedule fits beside the shards of all units. Where several forwards wait for their backwards (of
            graph breaks, of layers compiled one by one, of several calls), what they keep is known only when they have
            run: only the last graph of a step uses what they leave, and a warning says where they leave too little.
            None: what it takes to gather and to reduce one unit ahead, or more where that saves more of the time than
            it takes of the memory.
        cluster: what schedules are made for: a :class:`vescale_compile.cost.Cluster`, the name of a preset
            (``"h100"``), or the path of a calibration file. None: what this machine seems to be.
        registered_memory: slots are memory that the process group has registered with its network (NCCL). Compiling
            raises RuntimeError where it has none.
    """

    lowering: str = "inductor"
    deadline: float = DEADLINE_S
    memory_budget: int | str | None = None
    cluster: str | Cluster | None = None
    registered_memory: bool = False

    def __post_init__(self) -> None:
        if self.lowering not in LOWERINGS:
            raise ValueError(f"vescale option lowering={self.lowering!r}: choose one of {', '.join(LOWERINGS)}")
        if type(self.deadline) not in (int, float) or not 0 < self.deadline < _LONGEST_S:
            raise ValueError(
                f"vescale option deadline={self.deadline!r}: give a number of seconds above 0 and below {_LONGEST_S:g}"
            )
        if not isinstance(self.cluster, str | Cluster | None):
            raise ValueError(f"vescale option cluster={self.cluster!r}: give a Cluster, a preset's name or a file")
        _ = self.budget_bytes
        if not isinstance(self.registered_memory, bool):
            raise ValueError(f"vescale option registered_memory={self.registered_memory!r}: give True or False")

    @property
    def budget_bytes(self) -> int | None:
        """The memory budget in bytes."""
        given = self.memory_budget
        if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
            return given
        nbytes = bytes_in(given) if isinstance(given, str) else 0
        if nbytes == 0:
            raise ValueError(f"vescale option memory_budget={given!r}: give bytes, or a text such as '40GB'")
        return nbytes


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Reads ``options=`` of ``torch.compile``; raises ValueError for a name that does not exist."""
    known = {field.name for field in dataclasses.fields(Options)}
    if unknown := sorted(set(given or ()) - known):
        raise ValueError(f"unknown vescale options {unknown}: there are {', '.join(sorted(known))}")
    return Options(**(given or {}))
