"""What autograd is about to do, and what is to be done when it has.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes


def saves_elsewhere() -> bool:
    """Whether what autograd saves now goes through hooks, as activation checkpointing's, which drop it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def outside_tracing() -> AbstractContextManager[Any]:
    """Inside it operators run, whatever is tracing: for what a tensor does when its elements are asked for."""
    return _disable_current_modes()


def below_autograd() -> AbstractContextManager[Any]:
    """Autograd sees nothing of what runs in it. Dynamo guards what tensors would be dispatched to, so what is compiled
    in it is compiled once, wherever it is entered from."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def profiled_to_the_end(device: torch.device) -> bool:
    """Whether a collective launched now must be waited for before the profiler stops: gloo's call back into the
    profiler that has seen them begin when they are waited for, and crash if it is gone.
    """
    return device.type == "cpu" and torch._C._autograd._profiler_enabled()


class ReceivesGradients(Protocol):
    """The context of an autograd function, by what it keeps there."""

    buffer: Any
    reduces: bool
    params: tuple[Any, ...]


def backward_node() -> Any:
    """The autograd node that this thread is running, None outside of backwards. No public name tells a backward which
    forward's it is."""
    return torch._C._current_autograd_node()


def will_run(function: ReceivesGradients) -> bool:
    """Whether the backward that is running comes to it: it does not where ``torch.autograd.grad`` asks for others."""
    return torch._C._will_engine_execute_node(function)  # type: ignore[arg-type]


def left_out(function: ReceivesGradients) -> list[Any]:
    """The leaves it gives gradients to whose ``.grad`` the backward that is running does not add to:
    ``backward(inputs=...)`` names others, or ``torch.autograd.grad`` returns their gradients."""
    leaves = zip(function.params, function.next_functions, strict=True)  # type: ignore[attr-defined]
    return [leaf for leaf, (node, _) in leaves if not _adds_to_grad(node)]


def _adds_to_grad(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # of leaves whose gradient is returned it can't say
        return False


def in_backward() -> bool:
    """Whether this thread is running an autograd backward."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> Callable[[], object]:
    """Calls ``function`` when the backward that is running has run, as DistributedDataParallel does; not compiled.

    Returns a reference, dead when that backward is over, also where it raised: the traceback of an exception that is
    kept has ``function`` in its frames, but not what autograd was given, which has none.
    """
    queued = functools.partial(torch.compiler.disable(function))
    torch.autograd.Variable._execution_engine.queue_callback(queued)
    return weakref.ref(queued)
