"""``unshard_param``: the call that module code makes for each use of a sharded parameter.

Dynamo records it as one node of the captured graph, and the ``bind`` pass replaces that node. Where nothing
is compiled it gathers.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_internals.tracing import (
    is_fake,
    is_traced_to_operators,
    is_tracing,
    never_start_tracing_at,
    operators_traced_into,
)
from . import eager
from .boundary import binding_of, bound

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
"""The one operator whose body may read parameters: ``hoist`` moves the calls out of it."""


@torch.compiler.allow_in_graph
def unshard_param(param: Tensor, place: str, accumulates: bool, dtype: torch.dtype) -> Tensor:
    """Returns the full parameter, of its global shape, in ``dtype``.

    ``place`` and ``accumulates`` are read by the compiler only: they are here so that Dynamo guards on
    them. A graph is reused for another parameter only where its unit is laid out alike.
    """
    try:
        return _unsharded(param, dtype)
    except AttributeError as error:
        # nn.Module takes one of a property for a missing attribute, and finds the shard by that name
        raise RuntimeError(
            f"[rank {dist.get_rank()}] a sharded parameter {_described(param)} cannot be read: {error}"
        ) from error


def _unsharded(param: Tensor, dtype: torch.dtype) -> Tensor:
    _check_has_memory(param)
    if is_fake(param):  # Dynamo asks for shape and dtype; or a simulation runs what is not compiled
        _check_compiled_by_us(param)
        _check_readable_here(param)
        if not is_tracing():
            _warn_of_no_prediction(param)
        return torch.empty(param.shape, dtype=dtype, device=param.device, requires_grad=param.requires_grad)
    return eager.unsharded(bound(param))


def _warn_of_no_prediction(param: Tensor) -> None:
    warnings.warn(
        f"[rank {dist.get_rank()}] a sharded parameter {_described(param)} is read outside of compiled code (behind a "
        "graph break, or torch.compiler.disable), in a simulation: its gather, and what is computed there, are in no "
        "prediction. TORCH_LOGS=graph_breaks says where it is",
        stacklevel=2,
    )


def _check_compiled_by_us(param: Tensor) -> None:
    """Another backend keeps the call in its graph, and would compute with a parameter that nobody gathered."""
    if is_traced_to_operators(cast(DTensor, param)):
        raise RuntimeError(
            f"[rank {dist.get_rank()}] a model with sharded parameters (one of them has shape {tuple(param.shape)}) is "
            "compiled by a backend that does not gather them. Compile it with torch.compile(model, backend='vescale'), "
            "and without torch.compiler.set_stance('aot_eager_then_compile'), which begins with another; torch.export "
            "takes a model as it is before fully_shard"
        )


def _check_has_memory(param: Tensor) -> None:
    """A backend that communicates nothing is for graphs of models that have none."""
    if param.is_meta and dist.get_backend() != "fake":
        raise RuntimeError(
            f"[rank {dist.get_rank()}] a sharded parameter {_described(param)} is on the meta device: it has no "
            "memory. Before the first step, on every rank: model.to_empty(device=...), then initialize its parameters "
            "or load a checkpoint"
        )


def _described(param: Tensor) -> str:
    """By its name, which the shape that Dynamo traces with does not have."""
    binding = binding_of(param)
    if binding is None:
        return f"of shape {tuple(param.shape)}"
    slot = binding.buffer.slots[binding.slot]
    return f"({slot.name!r} of unit {binding.buffer.name!r}, of shape {slot.shape})"


def _check_readable_here(param: Tensor) -> None:
    """Inside an operator that runs a user's function, PyTorch would take the shard for the parameter. Of a unit's
    parameters read before, most of these operators take no two, which are views of one buffer."""
    for operator in operators_traced_into():
        if operator is not CHECKPOINT:
            raise RuntimeError(
                f"[rank {dist.get_rank()}] a sharded parameter of shape {tuple(param.shape)} is read in what the "
                f"operator '{operator}' is given to run. Read it before (weight = self.weight.clone()), and use the "
                "copy there; in a module that is called there, by torch.func.functional_call"
            )


never_start_tracing_at(unshard_param, is_fake, bound, _unsharded, _check_has_memory, _described)
