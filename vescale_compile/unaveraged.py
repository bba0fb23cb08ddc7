"""Warns of trained parameters that no collective averages: added after ``fully_shard``, or of a model that was never
sharded, they differ between ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from .runtime.boundary import bound
from .torch_internals.tracing import source_name

_log = logging.getLogger(__name__)
_NAMED = 4  # of the parameters, in a warning


def leave_alone(params: Iterable[nn.Parameter]) -> None:
    """Marks parameters whose gradients the user does not want averaged."""
    for param in params:
        param._vescale_ignored = True  # type: ignore[attr-defined]


def warn_of_unaveraged(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Warns, once, of parameters that a graph trains and nothing has sharded."""
    found: dict[str, nn.Parameter] = {}
    for placeholder, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if not _is_whole(value):
            continue
        if hasattr(value, "_vescale_sharded"):
            refuse_replaced(value._vescale_sharded)
        if _is_trained(placeholder):
            found[_name_of(placeholder)] = value
    _warn(found)


def warn_of_unaveraged_in(module: nn.Module) -> None:
    """Warns, once, of parameters that a module which is not compiled may train and nothing has sharded."""
    if torch.is_grad_enabled():
        _warn({name: param for name, param in module.named_parameters() if _is_whole(param)})


def _is_whole(value: object) -> bool:
    """Whether it is a parameter with gradients that are to be averaged, which nothing has sharded."""
    if not isinstance(value, nn.Parameter) or isinstance(value, DTensor):
        return False
    return value.requires_grad and not hasattr(value, "_vescale_ignored")


def _is_trained(parameter: fx.Node) -> bool:
    """Whether anything that is computed from it in Dynamo's graph has a gradient."""
    results = (tree_leaves(user.meta.get("example_value")) for user in parameter.users)
    return any(isinstance(value, Tensor) and value.requires_grad for value in chain.from_iterable(results))


def _name_of(parameter: fx.Node) -> str:
    """As ``named_parameters`` of the compiled module has it."""
    path = re.findall(r"\._(?:modules|parameters)\['(.*?)'\]", source_name(parameter))
    return ".".join(path) or parameter.name


def refuse_replaced(sharded: Tensor, *gradient: Tensor) -> NoReturn:
    """Raises RuntimeError for a use of what ``sharded`` was before; as a hook of that, for a gradient of it."""
    buffer, slot = bound(sharded)
    raise RuntimeError(
        f"[rank {buffer.rank}] the model reads what parameter {buffer.slots[slot].name!r} was before fully_shard, "
        "which nothing trains any more. It is kept outside the module's parameters, in a list, a dict or a closure, "
        "say: read it as an attribute of its module, or keep such lists in nn.ParameterList"
    )


def _warn(found: Mapping[str, nn.Parameter]) -> None:
    params = [f"{name} {tuple(param.shape)}" for name, param in found.items() if not hasattr(param, "_vescale_named")]
    for param in found.values():
        param._vescale_named = True  # type: ignore[attr-defined]
    if params:
        _log.warning(
            "fully_shard: parameters are trained that are not sharded, as others are: their gradients are not "
            "averaged, and unless something else does so, as DistributedDataParallel, they will differ from rank to "
            "rank. There are %s: %s%s. If they were added after fully_shard, as adapters are, add them before it, or "
            "call fully_shard on their module; if they are to stay as they are, pass them in "
            "fully_shard(ignored_params=...).",
            len(params),
            ", ".join(params[:_NAMED]),
            ", ..." if len(params) > _NAMED else "",
        )
