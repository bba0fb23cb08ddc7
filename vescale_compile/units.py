"""Which parameters make a unit, and how a unit's parameters are grouped into buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .ragged.dtensor import RaggedDTensor


@dataclass(frozen=True)
class UnitMembers:
    """A unit before it is sharded: its module, its name, and its parameters by qualified name."""

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]


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
        params = {
            _join(name, key): param
            for key, param in part.named_parameters()
            if param not in taken and not isinstance(param, RaggedDTensor)
        }
        taken.update(params.values())
        if params:
            units.append(UnitMembers(name or "(root)", part, params))
    return units


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


def group_by_buffer(params: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Parameters that can share a buffer: of one dtype and device, all trainable or all frozen."""
    groups: dict[tuple[torch.dtype, torch.device, bool], dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        groups.setdefault((param.dtype, param.device, param.requires_grad), {})[name] = param
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
