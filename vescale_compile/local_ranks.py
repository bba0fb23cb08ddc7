"""The ranks of a command: started on this machine, or by torchrun."""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

_CPU_RANKS = 2  # if nobody says how many


def under_torchrun() -> bool:
    """Whether this process is one of the ranks already.

    Raises:
        ValueError: another launcher has said which rank this is, but not which of this machine's.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return False
    if missing := sorted({"LOCAL_RANK", "LOCAL_WORLD_SIZE"} - os.environ.keys()):
        raise ValueError(
            f"the environment has RANK and WORLD_SIZE, but not {' and '.join(missing)}: "
            "start the ranks by torchrun, or set what it sets; to start them from here, unset RANK and WORLD_SIZE"
        )
    return True


def number_of_ranks(wanted: int | None, device_type: str) -> int:
    """How many a command has whose ``--ranks`` is ``wanted``: by default torchrun's, or one for each GPU, or two.

    Raises:
        ValueError: wanted, and decided by torchrun.
    """
    if under_torchrun():
        if wanted is not None:
            raise ValueError("--ranks: torchrun decides the number of ranks (--nproc-per-node); leave it out")
        return int(os.environ["WORLD_SIZE"])
    return wanted or (torch.cuda.device_count() if device_type == "cuda" else _CPU_RANKS)


def check_gpus(ranks: int, remedy: str) -> None:
    """ValueError unless each of this machine's ranks, as many as are to be started or as torchrun has, has a GPU."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else ranks
    if ranks > torch.cuda.device_count():
        raise ValueError(f"{ranks} ranks on {torch.cuda.device_count()} GPUs: each needs one of its own; {remedy}")


def run_local_ranks(
    command: str, run: Callable[..., None], args: tuple[Any, ...], ranks: int, needs: Sequence[str] = ()
) -> int:
    """:func:`start_local_ranks`; returns the exit status of ``command``, which says what went wrong."""
    try:
        start_local_ranks(run, args, ranks, needs)
    except (ProcessRaisedException, ProcessExitedException) as error:
        print(f"{command}: rank {error.error_index} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130
    return 0


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


def join(
    local_rank: int,
    local_ranks: int,
    device_type: str,
    *,
    timeout: timedelta,
    rendezvous: str | None = None,
    threads: int | None = None,
) -> torch.device:
    """Makes this process a rank of the default process group.

    Args:
        local_rank: on this machine.
        local_ranks: that this machine has.
        device_type: "cuda", each rank with a GPU of its own and nccl, or "cpu", with gloo.
        timeout: of each collective.
        rendezvous: where ``local_ranks`` ranks meet; None: as torchrun's environment says.
        threads: of PyTorch; None: this machine's cores, shared alike.

    Returns:
        The rank's device.
    """
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_ranks))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=-1 if rendezvous is None else local_rank,
        world_size=-1 if rendezvous is None else local_ranks,
        timeout=timeout,
        device_id=device if device_type == "cuda" else None,
    )
    return device
