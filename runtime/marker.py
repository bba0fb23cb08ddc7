"""``unshard_param``: the call that module code makes for each use of a sharded parameter.

Dynamo records it as one node of the captured graph, and the ``bind`` pass replaces that node. Where nothing
is compiled it gathers.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_internals import is_fake, is_traced_to_operators, never_start_tracing_at
from . import eager
from .boundary import bound


@torch.compiler.allow_in_graph
def unshard_param(param: Tensor, place: str, accumulates: bool, dtype: torch.dtype) -> Tensor:
    """Returns the full parameter, of its global shape, in ``dtype``.

    ``place`` and ``accumulates`` are read by the compiler only: they are here so that Dynamo guards on
    them. A graph is reused for another parameter only where its unit is laid out alike.
    """
    if is_fake(param):  # Dynamo asks for shape and dtype
        _check_compiled_by_us(param)
        return torch.empty(param.shape, dtype=dtype, device=param.device, requires_grad=param.requires_grad)
    return eager.unsharded(bound(param))


never_start_tracing_at(unshard_param, is_fake, bound)


def _check_compiled_by_us(param: Tensor) -> None:
    """Another backend keeps the call in its graph, and would compute with a parameter that nobody gathered."""
    if is_traced_to_operators(cast(DTensor, param)):
        raise RuntimeError(
            f"[rank {dist.get_rank()}] a model with sharded parameters (one of them has shape {tuple(param.shape)}) is "
            "compiled by a backend that does not gather them. Compile it with torch.compile(model, backend='vescale'); "
            "torch.export takes a model as it is before fully_shard"
        )
