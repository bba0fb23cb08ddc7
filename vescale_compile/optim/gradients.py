"""Whether a step may begin: gradients of the same parameters on every rank, all of them finite and of use."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh import whole_mesh
from ..ragged.dtensor import RaggedDTensor
from ..ragged.local import same_layout
from ..runtime.agreement import agree
from .units import NamedParams, describe, local_elements, rank_prefix


class UnusableGradients(RuntimeError):
    """A gradient that is not finite, that the optimizer can't use, or that some ranks have and others lack.

    Raised on every rank, before a step has changed anything.
    """


def check_layouts(optimizer: str, params: NamedParams) -> None:
    """ValueError for a gradient on this rank that is not dense, or not laid out as its parameter."""
    for name, param in params:
        grad = param.grad
        if grad is None or is_usable(param):
            continue
        where = f"{rank_prefix(param)}{optimizer}: {describe(param, name)} has a gradient "
        if grad.layout is not torch.strided:
            raise ValueError(f"{where}of layout {grad.layout}; only dense ones can be used")
        raise ValueError(f"{where}that is not sharded as the parameter is: {grad!r}; redistribute it")


def is_usable(param: Tensor) -> bool:
    """Whether a parameter has a gradient on this rank that is dense and laid out as the parameter."""
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        return False
    return not isinstance(param, RaggedDTensor) or same_layout(param, grad)


def check_gradients(
    optimizer: str,
    params: NamedParams,
    *,
    refused: AbstractSet[Tensor] = frozenset(),
    reason: str = "",
    alike: Sequence[str] = (),
) -> None:
    """Reads every gradient once and compares the ranks: one all-reduce of five integers for each parameter.

    With hybrid sharding it is one for each dimension of the mesh: replicas step together or not at all, too.

    Args:
        optimizer: its name, for messages.
        params: names (for messages) and parameters, at least one, in the same order on every rank. Sharded ones are
            all on one mesh; one that is not sharded may have a gradient on some ranks alone.
        refused: parameters whose finite gradients the optimizer can't use on this rank.
        reason: what messages say of them.
        alike: lines that must be equal on every rank. Only where they are not do ranks exchange them.

    Raises:
        RanksDisagree: on every rank of the mesh, quoting the first of those lines that differs.
        UnusableGradients: on every rank of the mesh, naming a rank and a parameter.
        ValueError: instead, as :func:`check_layouts`, on the ranks that have a gradient of another layout.
    """
    first = next((param for _, param in params if isinstance(param, RaggedDTensor)), None)
    mesh = whole_mesh(first) if first is not None else None
    device = (first if first is not None else params[0][1]).device
    me = mesh.get_rank() if mesh is not None else 0

    flags = _flags(params, refused, device).to(torch.int32) * (me + 1)
    # The largest of all ranks' digests is the least, too, where they are equal.
    digest = zlib.crc32("\n".join(alike).encode()) >> 1
    codes = torch.cat([flags.flatten(), torch.tensor([digest, -digest], dtype=torch.int32, device=device)])
    for group in mesh.get_all_groups() if mesh is not None else ():
        if group.size() > 1:
            dist.all_reduce(codes, dist.ReduceOp.MAX, group=group)
    *found, largest, negated_least = codes.tolist()
    if mesh is not None and largest != -negated_least:
        agree(mesh, optimizer, alike, remedy="Give every rank's optimizer the same options, and load the same state.")

    check_layouts(optimizer, params)  # of this rank's own it says more
    of_each = zip(*(found[i : i + len(params)] for i in range(0, len(found), len(params))), strict=True)
    for (name, param), ranks in zip(params, of_each, strict=True):
        shards = isinstance(param, RaggedDTensor)
        problem = _problem(describe(param, name), _Ranks(*ranks), reason, shards=shards, alone=mesh is None)
        if problem is not None:
            raise UnusableGradients(f"{f'[rank {me}] ' if mesh is not None else ''}{optimizer}: {problem}")


class _Ranks(NamedTuple):
    """Of one gradient: a rank plus one, 0 if there is none. The largest of all ranks' names one of them."""

    has: int
    lacks: int
    has_misfit: int  # of another layout
    refuses: int
    has_infinite: int


def _flags(params: NamedParams, refused: AbstractSet[Tensor], device: torch.device) -> Tensor:
    """Which fields of :class:`_Ranks` this rank is in, for each parameter: [fields, parameters], bool."""
    tensors = [param for _, param in params]
    grads = [param.grad if is_usable(param) else None for param in tensors]
    present = [param.grad is not None for param in tensors]
    absent = [isinstance(param, RaggedDTensor) and param.grad is None for param in tensors]
    misfit = [has and grad is None for has, grad in zip(present, grads, strict=True)]
    unfit = [param in refused for param in tensors]
    known = torch.tensor([present, absent, misfit, unfit], device=device)
    return torch.cat([known, _infinite(grads, device)[None]])


def _problem(what: str, ranks: _Ranks, reason: str, *, shards: bool, alone: bool) -> str | None:
    """Why the gradient of ``what`` can't be used: a parameter of ``shards``, or one of a rank that steps ``alone``."""
    if shards and ranks.has and ranks.lacks:
        return (
            f"{what} has a gradient on rank {ranks.has - 1} and none on rank {ranks.lacks - 1}. All ranks must run the "
            "same backward. Nothing was changed."
        )
    if ranks.has_misfit:
        return (
            f"the gradient of {what} is not dense, or not laid out as the parameter is, on rank "
            f"{ranks.has_misfit - 1}. Nothing was changed: redistribute it there."
        )
    if ranks.has_infinite or ranks.refuses:
        on = "" if alone else f", on rank {(ranks.has_infinite or ranks.refuses) - 1}"
        why = "has NaN or infinite elements" if ranks.has_infinite else reason
        scaler = ", or step through torch.amp.GradScaler, which skips such steps" if ranks.has_infinite else ""
        return f"the gradient of {what} {why}{on}. Nothing was changed: skip this step{scaler}."
    return None


def _infinite(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """For each gradient whether this rank's elements hold NaN or an infinity: [gradients], bool."""
    finite = [torch.ones((), dtype=torch.bool, device=device)] * len(grads)
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, grad in enumerate(grads):
        if grad is not None:
            local = local_elements(grad) if isinstance(grad, RaggedDTensor) else grad
            if local.numel() > 0:
                by_device.setdefault(local.device, []).append((i, local))
    for where, members in by_device.items():
        found = _all_finite([local for _, local in members], where).to(device)
        for (i, _), each in zip(members, found, strict=True):
            finite[i] = each
    return ~torch.stack(finite)


def _all_finite(tensors: list[Tensor], device: torch.device) -> Tensor:
    """For each tensor whether all its elements are finite: [tensors], bool."""
    if device.type == "cpu":
        # 10 times faster there than norms, for the gradients of a Llama of 30M. NaN is both the least and the largest.
        ends = torch.stack([end for tensor in tensors for end in torch.aminmax(tensor)])
        return torch.isfinite(ends).view(-1, 2).all(1)
    # Elsewhere one kernel for all tensors, where ends would take one for each.
    return torch.isfinite(torch.stack(torch._foreach_norm(tensors, float("inf"))))
