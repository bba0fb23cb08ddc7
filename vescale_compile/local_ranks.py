"""Starts the ranks of a command on this machine."""

import importlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes


def start_local_ranks(run: Callable[..., None], args: tuple[Any, ...], ranks: int, needs: Sequence[str] = ()) -> None:
    """Calls ``run(rank, *args, ranks, rendezvous)`` in a process for each rank, and returns when all are done.

    They are forked from this process, which imports what they need once for all, unless this is a build with CUDA:
    that can't be used after a fork, nor can the threads which autograd and pools of compilers start there.

    Args:
        needs: modules, besides those imported by now.

    Raises:
        ProcessRaisedException, ProcessExitedException: a rank failed; the others have been ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A file, not a port: nothing else on the machine can take it between choice and use.
        rendezvous = f"file://{folder}/rendezvous"
        forked = not torch.backends.cuda.is_built()
        if forked:
            for module in needs:
                importlib.import_module(module)
        start_processes(run, (*args, ranks, rendezvous), ranks, start_method="fork" if forked else "spawn")
