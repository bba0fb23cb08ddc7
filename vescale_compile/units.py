"""Which parameters make a unit, and how a unit's parameters are grouped into buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .ragged.dtensor import RaggedDTensor

# Of a run, or a part: a collective of less takes as long as one of nothing, or nearly; longer on more ranks. A GPU's
# host takes longer to launch one than NVLink takes to bring 16 MiB, but larger parts take more memory.
_LEAST_BYTES = 1 << 20
_LEAST_BYTES_OF_GPU = 1 << 24
_LEAST_BYTES_OF_RANK = 1 << 18
_LEAST_SHARE = 0.15  # of a block that a part must have: cutting less off leaves a gather nearly as long
_MOST_PADDING = 1.01  # times the bytes of the whole that parts may take
_Run = dict[str, nn.Parameter]

PaddedBytes = Callable[[Mapping[str, nn.Parameter]], int]
"""What parameters, by qualified name, take in buffers of their own."""


@dataclass(frozen=True)
class UnitMembers:
    """A unit before it is sharded.

    Attributes:
        name: of the unit.
        module: whose parameters they are.
        runs: parameters by qualified name, in the order of the module; what stands in another run is read at another
            time: before or after the units inside, or in another part of a block.
        is_cut: whether the runs are parts of a block.
    """

    name: str
    module: nn.Module
    runs: tuple[_Run, ...]
    is_cut: bool


def find_units(
    module: nn.Module,
    ignored: set[nn.Parameter],
    *,
    nested_units: bool,
    world_size: int,
    device_type: str,
    padded_bytes: PaddedBytes,
) -> list[UnitMembers]:
    """The units that ``fully_shard(module)`` makes, inner ones first.

    Args:
        module: the module that was given.
        ignored: parameters left as they are.
        nested_units: whether modules inside ``module`` are units already. If not, each element of every
            outermost list of modules becomes a unit, and the rest another.
        world_size: ranks to shard over.
        device_type: that the ranks compute on, such as "cuda".
        padded_bytes: an element of a list is not cut where its parts would take over 1 % more than the whole.
    """
    taken: set[nn.Parameter] = set(ignored)
    least = _LEAST_BYTES if device_type == "cpu" else _LEAST_BYTES_OF_GPU
    units = []
    for path, block in [] if nested_units else _list_elements(module, ""):
        params = {_join(path, name): param for name, param in block.named_parameters() if _is_free(param, taken)}
        if params:
            parts = _by_part(block, params, max(least, _LEAST_BYTES_OF_RANK * world_size), padded_bytes)
            units.append(UnitMembers(path, block, parts, is_cut=len(parts) > 1))
            taken.update(params.values())
    if rest := _around_units(module, taken, ignored, least):
        units.append(UnitMembers("(root)", module, rest, is_cut=False))
    return units


def _is_free(param: nn.Parameter, taken: set[nn.Parameter]) -> bool:
    return param not in taken and not isinstance(param, RaggedDTensor)


def _around_units(
    module: nn.Module, taken: set[nn.Parameter], ignored: set[nn.Parameter], least: int
) -> tuple[_Run, ...]:
    """Parameters that no unit has, cut where those of units inside stand between them.

    A run of less than ``least`` bytes stays with the one before, or after.
    """
    runs: list[_Run] = [{}]
    for name, param in module.named_parameters():
        if _is_free(param, taken):
            runs[-1][name] = param
        elif param not in ignored:
            runs.append({})
    joined: list[_Run] = []
    for run in filter(None, runs):
        if joined and min(_nbytes(run.values()), _nbytes(joined[-1].values())) < least:
            joined[-1].update(run)
        else:
            joined.append(run)
    return tuple(joined)


def _by_part(block: nn.Module, params: _Run, least: int, padded_bytes: PaddedBytes) -> tuple[_Run, ...]:
    """A block's parameters by the part that holds them, attention and the matrices of a feed-forward, say: each is
    gathered while those before are computed, and reduced while the next are. A part has ``least`` bytes at least."""
    enough = max(least, _LEAST_SHARE * _nbytes(params.values()))
    return tuple(_cut(params, set(params.values()), _parts(block), enough, padded_bytes))


# No closure: one that calls itself is a cycle, and keeps what it knows, parameters, until cycles are looked for.
def _cut(
    params: _Run,
    held: set[nn.Parameter],
    pieces: Iterable[nn.Module | nn.Parameter],
    enough: float,
    padded_bytes: PaddedBytes,
) -> list[_Run]:
    """What is held of ``params``, cut into those of its pieces, and of theirs, that have ``enough`` bytes.

    What is in none, such as norms, stays with the first: that one is gathered before the others, and its gradients
    are complete after theirs.
    """
    parts: list[_Run] = []
    left = held
    for piece in pieces:
        inside = left.intersection([piece] if isinstance(piece, nn.Parameter) else piece.parameters())
        if _nbytes(inside) >= enough:
            parts += _cut(params, inside, _pieces(piece), enough, padded_bytes)
            left = left.difference(inside)
    whole = {name: param for name, param in params.items() if param in held}
    if len(parts) < 2:
        return [whole]
    others = {param for part in parts[1:] for param in part.values()}
    runs = [{name: param for name, param in whole.items() if param not in others}, *parts[1:]]
    return runs if sum(map(padded_bytes, runs)) <= _MOST_PADDING * padded_bytes(whole) else [whole]


def _parts(block: nn.Module) -> Iterator[nn.Module | nn.Parameter]:
    """The parameters and the modules directly inside; of a list, which has no forward, its elements."""
    yield from block.parameters(recurse=False)
    for child in block.children():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child)
        else:
            yield child


def _pieces(part: nn.Module | nn.Parameter) -> Iterator[nn.Module | nn.Parameter]:
    """The parameters and the modules directly inside a part, which are used whenever it is: not those of a list, which
    may be experts, of which ranks use different ones."""
    if not isinstance(part, nn.Parameter | nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        yield from part.parameters(recurse=False)
        yield from part.children()


def _nbytes(params: Iterable[nn.Parameter]) -> int:
    return sum(param.nbytes for param in params)


def _is_list(module: nn.Module) -> bool:
    """An ``nn.ModuleList``, or an ``nn.ModuleDict`` of numbers: a pipeline's stage keeps the layers' numbers so."""
    numbered = isinstance(module, nn.ModuleDict) and all(name.isdigit() for name in module)
    return numbered or isinstance(module, nn.ModuleList)


def _list_elements(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Elements of the outermost module lists, each once even where it stands in several places.

    A list in a list has no forward either: its elements count.
    """
    seen: set[nn.Module] = set()
    for name, child in module.named_children():
        path = _join(prefix, name)
        is_element = _is_list(module) and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        for key, element in [(path, child)] if is_element else _list_elements(child, path):
            if element not in seen:
                seen.add(element)
                yield key, element


def group_by_buffer(run: Mapping[str, nn.Parameter]) -> list[_Run]:
    """Those parameters of a run that can share a buffer: of one dtype and device, all trainable or all frozen."""
    groups: dict[tuple[torch.dtype, torch.device, bool], _Run] = {}
    for name, param in run.items():
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
