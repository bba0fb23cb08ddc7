"""Which parameters make a unit, and how a unit's parameters are grouped into buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .ragged.dtensor import RaggedDTensor

_LEAST_BYTES = 1 << 20  # of a run: a collective of less takes as long as one of nothing, or nearly


@dataclass(frozen=True)
class UnitMembers:
    """A unit before it is sharded.

    Attributes:
        name: of the unit.
        module: whose parameters they are.
        runs: parameters by qualified name, in the order of the module; what stands in another run is read at another
            time, before or after the units inside.
    """

    name: str
    module: nn.Module
    runs: tuple[dict[str, nn.Parameter], ...]

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """All of them."""
        return {name: param for run in self.runs for name, param in run.items()}


def find_units(module: nn.Module, ignored: set[nn.Parameter], *, nested_units: bool) -> list[UnitMembers]:
    """The units that ``fully_shard(module)`` makes, inner ones first.

    Args:
        module: the module that was given.
        ignored: parameters left as they are.
        nested_units: whether modules inside ``module`` are units already. If not, each element of every
            outermost ``nn.ModuleList`` becomes a unit, and the rest another.
    """
    taken: set[nn.Parameter] = set(ignored)
    blocks = [] if nested_units else list(_list_elements(module, ""))
    units = []
    for name, part in [*blocks, ("", module)]:
        runs = _runs(name, part, taken, ignored)
        if runs:
            units.append(UnitMembers(name or "(root)", part, runs))
            taken.update(units[-1].params.values())
    return units


def _runs(
    prefix: str, part: nn.Module, taken: set[nn.Parameter], ignored: set[nn.Parameter]
) -> tuple[dict[str, nn.Parameter], ...]:
    """Parameters of ``part`` that no unit has, cut where those of units inside stand between them.

    A run too small for a collective of its own stays with the one before, or after.
    """
    runs: list[dict[str, nn.Parameter]] = [{}]
    for key, param in part.named_parameters():
        if param in ignored:
            continue
        if param in taken or isinstance(param, RaggedDTensor):
            runs.append({})
        else:
            runs[-1][_join(prefix, key)] = param
    joined: list[dict[str, nn.Parameter]] = []
    for run in filter(None, runs):
        if joined and min(_nbytes(run), _nbytes(joined[-1])) < _LEAST_BYTES:
            joined[-1].update(run)
        else:
            joined.append(run)
    return tuple(joined)


def _nbytes(params: dict[str, nn.Parameter]) -> int:
    return sum(param.nbytes for param in params.values())


def _list_elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Elements of the outermost module lists, each once even where it stands in several places.

    A list in a list has no forward either: its elements count.
    """
    seen: set[nn.Module] = set()
    for name, child in module.named_children():
        path = _join(prefix, name)
        is_element = isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        for key, element in [(path, child)] if is_element else _list_elements(child, path):
            if element not in seen:
                seen.add(element)
                yield key, element


def group_by_buffer(unit: UnitMembers) -> list[dict[str, nn.Parameter]]:
    """Parameters that can share a buffer: of one run, dtype and device, all trainable or all frozen."""
    groups: dict[tuple[int, torch.dtype, torch.device, bool], dict[str, nn.Parameter]] = {}
    for number, run in enumerate(unit.runs):
        for name, param in run.items():
            groups.setdefault((number, param.dtype, param.device, param.requires_grad), {})[name] = param
    return list(groups.values())


def owners(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Every place in ``module`` that holds each parameter; a tied one has several."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                found.setdefault(param, []).append((part, name))
    return found


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
