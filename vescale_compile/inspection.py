"""``explain``: what the compiler makes of a model."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from .backend import own_errors, vescale
from .report import GraphReport, Report
from .runtime.crossing import forget_carried
from .runtime.decisions import Trial
from .runtime.writes import version_of
from .sharded_module import uncompiled


def explain(model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Report:
    """Compiles a sharded model and reports what its graphs do: schedule, slots, memory, communication and copies.

    It runs the forward once, on the arguments given, so every rank of the mesh must call it; operator by operator, for
    Inductor would take most of the time to write kernels that the report says nothing of. Nothing is trained:
    gradients, parameters, buffers and random state stay as they are, and what ranks decide here (which units are kept,
    say) is decided anew when they train; what they have decided for training is shown.

    Args:
        model: a module that ``fully_shard`` was called on, compiled or not.
        args, kwargs: of its forward. In training mode and with gradients enabled the backward is compiled too.
        options: as of ``torch.compile(..., options=...)``; those that ``model`` was compiled with are not known here.

    Returns:
        The report; ``print(vc.explain(model, tokens))`` shows it.

    Raises:
        GraphError: a graph that can't be compiled, or a budget that no schedule fits in.
        ValueError: an option that does not exist, or has an impossible value.
        RanksDisagree, RanksMissing: ranks that differ.
        torch._dynamo.exc.BackendCompilerFailed: around anything else, as the RuntimeError of ``registered_memory``.
    """
    graphs: list[GraphReport] = []
    module = uncompiled(model)
    backend = functools.partial(vescale, options=options, on_compiled=graphs.append, generate_code=False, trial=Trial())
    devices = {param.device for param in module.parameters() if param.device.type == "cuda"}
    compiled_in_place = mock.patch.object(module, "_compiled_call_impl", None)  # by module.compile(), for training
    with own_errors(), torch.random.fork_rng(devices=list(devices)), _buffers_kept(module), compiled_in_place:
        torch.compile(module, backend=backend, **_OF_ITS_OWN)(*args, **kwargs)
    forget_carried()  # there is no backward to take what the forward launched for it
    return Report(tuple(graphs))


# Dynamo counts compilations of a function up to its recompile limit, those of the model's own training too. Where
# PyTorch has no such argument, as in 2.11, ours are among them.
_OF_ITS_OWN: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Gives buffers (running statistics, say) back the values that they had."""
    before = [
        (part, name, buffer, buffer.clone(), version_of(buffer))
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value, writes in before:
                part._buffers[name] = buffer if version_of(buffer) == writes else buffer.copy_(value)
