"""``explain``: what the compiler makes of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .backend import vescale
from .report import GraphReport, Report
from .runtime.crossing import forget_carried


def explain(model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Compiles a sharded model and reports what its graphs do: schedule, slots, memory, communication and copies.

    It runs the forward once, on the arguments given, so every rank of the mesh must call it; operator by operator, for
    Inductor would take most of the time to write kernels that the report says nothing of. Nothing is trained:
    gradients, parameters and random state stay as they are.

    Args:
        model: a module that ``fully_shard`` was called on, compiled or not.
        args, kwargs: of its forward. In training mode and with gradients enabled the backward is compiled too.
        options: as of ``torch.compile(..., options=...)``.

    Returns:
        The report; ``print(vc.explain(model, tokens))`` shows it.
    """
    graphs: list[GraphReport] = []
    module = model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else model
    backend = functools.partial(vescale, options=options, on_compiled=graphs.append, generate_code=False)
    devices = {param.device for param in module.parameters() if param.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        torch.compile(module, backend=backend)(*args, **kwargs)
    forget_carried()  # there is no backward to take what the forward launched for it
    return Report(tuple(graphs))
