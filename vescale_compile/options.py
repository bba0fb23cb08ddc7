"""Options of ``torch.compile(model, backend="vescale", options={...})``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch._inductor.config

from .cost import Cluster, Device
from .quantities import bytes_in, share_in, size_text
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
        deadline: seconds that a rank waits for the others' word that they compiled the same collectives; or three times
            what its own compilation took, or had taken when its code was put in the cache, where that is longer.
        memory_budget: bytes that a step may take on a rank, optimizer states apart: a number, text such as ``"40GB"``,
            or a share of the GPU's memory such as ``"90%"``, of which two states for each trained parameter are left
            out. What it leaves is used to keep units for the backward that would be gathered again, and to launch
            ahead; where batches differ in size, the first decides what is kept. Compiling raises GraphError where no
            schedule fits beside the shards of all units, or where that memory is not known. Where several forwards
            wait for their backwards (of graph breaks, of layers compiled one by one, of several calls), what they keep
            is known only when they have run: only the last graph of a step uses what they leave, and a warning says
            where they leave too little. None: what it takes to gather and to reduce one unit ahead, or more where that
            saves more of the time than it takes of the memory.
        cluster: what schedules are made for: a :class:`vescale_compile.cost.Cluster`, the name of a preset
            (``"h100"``), or the path of a calibration file. None: what this machine seems to be.
        registered_memory: slots are memory that the process group has registered with its network (NCCL). Compiling
            raises RuntimeError where it has none.
    """

    lowering: str = "inductor"
    deadline: float = DEADLINE_S
    memory_budget: float | str | None = None
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
        if self.memory_budget is not None and self._share is None and not self._bytes:
            raise ValueError(
                f"vescale option memory_budget={self.memory_budget!r}: give a whole number of bytes, or a text such as "
                "'40GB' or '90%'"
            )
        if not isinstance(self.registered_memory, bool):
            raise ValueError(f"vescale option registered_memory={self.registered_memory!r}: give True or False")

    @property
    def budget_text(self) -> str:
        """The memory budget, equal on ranks that mean the same, whatever their devices have."""
        if self._share is not None:
            return f"{100 * self._share:g}%"
        return "None" if self._bytes is None else f"{self._bytes} bytes"

    def budget_on(self, device: Device, state_bytes: int) -> int | None:
        """The memory budget in bytes, on a device that holds an optimizer's states besides.

        Raises:
            ValueError: it is a share of memory that nobody knows, or that the states alone fill.
        """
        if self._share is None:
            return self._bytes
        told = f"vescale option memory_budget={self.memory_budget!r}"
        if device.memory_bytes is None:
            raise ValueError(f"{told}: how much memory {device.name!r} has for it is not known; give bytes")
        share = int(self._share * device.memory_bytes)
        if share <= state_bytes:
            raise ValueError(
                f"{told}: that is {size_text(share)}, and the states of an optimizer with two for each parameter alone "
                f"take {size_text(state_bytes)}. More ranks to shard over have less each; or give bytes"
            )
        return share - state_bytes

    @property
    def _share(self) -> float | None:
        return share_in(self.memory_budget) if isinstance(self.memory_budget, str) else None

    @property
    def _bytes(self) -> int | None:
        given = self.memory_budget
        if isinstance(given, str):
            return bytes_in(given) or None
        if type(given) is float and given.is_integer():
            given = int(given)
        return given if type(given) is int and given > 0 else None


def read_options(given: Mapping[str, Any] | None) -> Options:
    """Reads ``options=`` of ``torch.compile``; raises ValueError for a name that does not exist."""
    known = {field.name for field in dataclasses.fields(Options)}
    if unknown := sorted(set(given or ()) - known):
        inductor = ", ".join(name for name in unknown if hasattr(torch._inductor.config, name))
        hint = f". Of Inductor's settings, set torch._inductor.config's: {inductor}" if inductor else ""
        raise ValueError(f"unknown vescale options {unknown}: there are {', '.join(sorted(known))}{hint}")
    return Options(**(given or {}))
