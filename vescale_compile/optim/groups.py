"""Parameter groups of an optimizer with two algorithms: one for hidden matrices, and AdamW for the rest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..ragged.dtensor import RaggedDTensor
from ..runtime.boundary import binding_of
from .hidden import is_hidden_matrix
from .units import NamedParams, describe, rank_prefix


def split_group(
    optimizer: str, group: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A user's group as one group for each algorithm in it, with every option that the algorithm has.

    Args:
        optimizer: its name, for messages.
        group: ``params``, a list of tensors or of pairs of name and tensor; options; perhaps ``algorithm``. Without,
            the rule of :func:`is_hidden_matrix` decides for each parameter.
        defaults: options of each algorithm, the one for matrices first and ``"adamw"`` second.

    Raises:
        ValueError: an algorithm that does not exist, a parameter or an option that none of the group's takes.
        TypeError: a parameter that is no tensor.
    """
    matrix, other = defaults
    params = group["params"]
    named: NamedParams = [param if isinstance(param, tuple) else (None, param) for param in params]
    algorithm = group.get("algorithm")
    if algorithm not in (None, *defaults):
        raise ValueError(
            f"{optimizer}: a group's algorithm is {algorithm!r}; give {matrix!r} or {other!r}, or leave it out"
        )
    for name, param in named:
        _check_param(optimizer, name, param, is_matrix=algorithm == matrix)
    if algorithm is None:
        chosen = [matrix if hidden else other for hidden in _by_rule(optimizer, named)]
    else:
        chosen = [algorithm] * len(named)
    groups = []
    for kind in defaults:
        members = [param for param, choice in zip(params, chosen, strict=True) if choice == kind]
        if members or kind == algorithm or not params:
            others = {option for options in defaults.values() for option in options} - {*defaults[kind]}
            options = {key: value for key, value in group.items() if key not in others}
            groups.append({**defaults[kind], **options, "params": members, "algorithm": kind})
    for key in group:
        owners = [kind for kind, options in defaults.items() if key in options]
        if owners and not any(each["algorithm"] in owners for each in groups):
            raise ValueError(f"{optimizer}: a group has the option {key!r} of {owners[0]!r}, and no parameter for it")
    return groups


def wrong_common_options(group: Mapping[str, Any]) -> list[str]:
    """What is wrong with the options that both algorithms have, and with AdamW's."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        return [f"lr is a tensor of shape {tuple(lr.shape)}; give a number, or a tensor of one element"]
    at_least_0 = sorted({"lr", "weight_decay", "eps"} & group.keys())
    wrong = [f"{key} is {group[key]}; it must be at least 0" for key in at_least_0 if not group[key] >= 0]
    wrong += unsupported_options(group)
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        wrong.append(f"betas is {betas}; it must be two numbers of at least 0 and below 1")
    if group.get("foreach") and isinstance(lr, Tensor):
        wrong.append("foreach is True and lr a tensor; torch.optim.AdamW has no such form")
    return wrong


def unsupported_options(group: Mapping[str, Any]) -> list[str]:
    """What a group asks for that ``torch.optim.AdamW`` has, and the optimizers here have not."""
    asked = (key for key in ("amsgrad", "capturable", "differentiable", "fused", "maximize") if group.get(key))
    return [f"{key} is {group[key]!r}, which is not supported; leave it out" for key in asked]


def _by_rule(optimizer: str, named: NamedParams) -> list[bool]:
    known = [(_name_in_module(param) if name is None else name, param) for name, param in named]
    hidden = [is_hidden_matrix(name, param) for name, param in known]
    nameless = sum(is_hidden for (name, _), is_hidden in zip(known, hidden, strict=True) if name is None)
    if nameless:
        warnings.warn(
            f"{optimizer}: {nameless} matrices have no names that would tell embeddings and heads, and none is taken "
            "for one. Pass model.named_parameters(), or groups that say their 'algorithm'.",
            stacklevel=6,
        )
    return hidden


def _name_in_module(param: Tensor) -> str | None:
    binding = binding_of(param)
    return None if binding is None else binding.buffer.slots[binding.slot].name


def _check_param(optimizer: str, name: str | None, param: Tensor, *, is_matrix: bool) -> None:
    if not isinstance(param, Tensor):
        what = "a parameter" if name is None else f"parameter {name!r}"
        raise TypeError(f"{optimizer}: {what} is a {type(param).__name__}; give a tensor")
    where = f"{rank_prefix(param)}{optimizer}: {describe(param, name)} "
    if isinstance(param, DTensor) and not isinstance(param, RaggedDTensor):
        raise ValueError(
            f"{where}is a DTensor placed by {param.placements}; shard the model with vescale_compile.fully_shard"
        )
    if torch.is_complex(param):
        raise ValueError(f"{where}is complex; real parameters are needed")
    if is_matrix and (param.ndim not in (2, 3) or param.numel() == 0):
        raise ValueError(
            f"{where}is no matrix [m, n] and no stack of matrices [experts, m, n]; put it into a group with "
            "'algorithm': 'adamw'"
        )
    if not isinstance(param, RaggedDTensor) and not param.is_contiguous():
        raise ValueError(f"{where}is not contiguous (strides {param.stride()}); replace it by its .contiguous()")
