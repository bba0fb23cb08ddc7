"""``unshard_param``: the call that module code makes for each use of a sharded parameter.

Dynamo records it as one node of the captured graph, and the ``bind`` pass replaces that node. Where nothing
is compiled it gathers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_internals import is_fake
from . import eager
from .boundary import bound


@torch.compiler.allow_in_graph
def unshard_param(param: Tensor, layout: str, reduce_in_graph: bool, dtype: torch.dtype) -> Tensor:
    """Returns the full parameter, of its global shape, in ``dtype``.

    ``layout`` and ``reduce_in_graph`` are read by the compiler only: they are here so that Dynamo guards on
    them. A graph is reused for another parameter only where its unit is laid out alike.
    """
    if is_fake(param):  # Dynamo asks for shape and dtype
        return torch.empty(param.shape, dtype=dtype, device=param.device, requires_grad=param.requires_grad)
    return eager.unsharded(bound(param))
