"""What must be right for training to work here, each as a check that says what was found and what to do about it."""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .cost import Calibration, Cluster
from .cost.devices import TO_CALIBRATE
from .hardware import cluster_for
from .torch_internals.inductor import inductor_cache_folder

TRIED_PYTHONS = ((3, 11), (3, 12))
TRIED_TORCHES = ((2, 11), (2, 12), (2, 13))
DEADLINE_S = 120.0
"""of each check that starts processes"""
_TAIL = 600

# Of another factor each time, so that no cache hides a compiler that is missing.
_COMPILES = """
import torch
multiple = torch.compile(lambda x: ({factor} * x).relu())
assert multiple(torch.tensor([1.0, -1.0])).tolist() == [{factor}, 0.0]
"""
_EXCHANGES = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from vescale_compile.runtime.collectives import start_all_gather
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
full = torch.empty(2)
start_all_gather(torch.tensor([float(rank)]), full, dist.group.WORLD).wait()
assert full.tolist() == [0.0, 1.0], full
dist.destroy_process_group()
"""


class Verdict(enum.Enum):
    """How a check ended."""

    FINE = "ok"
    NOTE = "note"  # works, but not as well as it could, or untried
    BROKEN = "BROKEN"  # nothing can be trained


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do if it is not fine."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def fine(what: str, found: str) -> Finding:
    return Finding(what, Verdict.FINE, found)


def python_version() -> Finding:
    version = sys.version.split()[0]
    if sys.version_info[:2] in TRIED_PYTHONS:
        return fine("Python", version)
    return Finding("Python", Verdict.NOTE, f"{version}, on which nothing was tried", f"use {_versions(TRIED_PYTHONS)}")


def torch_version() -> Finding:
    version = torch.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers in TRIED_TORCHES:
        return fine("PyTorch", version)
    return Finding("PyTorch", Verdict.NOTE, f"{version}, on which nothing was tried", f"use {_versions(TRIED_TORCHES)}")


def backend() -> Finding:
    if "vescale" in torch.compiler.list_backends():
        return fine("backend", "'vescale' is registered")
    return Finding(
        "backend",
        Verdict.BROKEN,
        "torch.compile does not know 'vescale'",
        "install the package, with its entry point: pip install -e .",
    )


def compiler() -> Finding:
    wanted = os.environ.get("CXX", "g++")  # Inductor tries no other
    if (found := shutil.which(wanted)) is not None:
        return fine("C++ compiler", found)
    remedy = "install g++ (apt-get install g++), or name a compiler in CXX"
    return Finding(
        "C++ compiler",
        Verdict.BROKEN if not torch.cuda.is_available() else Verdict.NOTE,
        f"no {wanted!r}; Inductor needs it for CPU kernels",
        "set CXX=clang++" if shutil.which("clang++") else remedy,
    )


def inductor() -> Finding:
    factor = time.time_ns() % 2**24  # which fp32 holds
    failure = _run([[sys.executable, "-c", _COMPILES.format(factor=factor)]], {})
    if failure is None:
        return fine("Inductor", "compiles and runs a function")
    return Finding(
        "Inductor",
        Verdict.BROKEN,
        failure,
        'see that the compiler works, and that Python\'s headers are there (python3-dev); options={"lowering": '
        '"eager"} trains without Inductor, slower',
    )


def caches() -> Finding:
    try:
        folder = inductor_cache_folder()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("caches", Verdict.BROKEN, f"can't write: {error}", "set TORCHINDUCTOR_CACHE_DIR")
    return fine("caches", f"can write to {folder}")


def communication() -> Finding:
    present = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    wanted = "nccl" if torch.cuda.is_available() else "gloo"
    if wanted in present:
        return fine("communication", ", ".join(present))
    return Finding(
        "communication",
        Verdict.BROKEN,
        f"this PyTorch has no {wanted} ({', '.join(present) or 'no backend at all'})",
        "install a build of PyTorch with torch.distributed for this machine",
    )


def exchange() -> Finding:
    if not dist.is_gloo_available():
        return Finding("two ranks", Verdict.NOTE, "not tried: this PyTorch has no gloo")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [[sys.executable, "-c", _EXCHANGES, str(rank), f"{folder}/store"] for rank in range(2)]
        failure = _run(ranks, {"OMP_NUM_THREADS": "1"})
    if failure is None:
        return fine("two ranks", "exchange data over gloo")
    return Finding(
        "two ranks",
        Verdict.BROKEN,
        failure,
        "see that this host's name resolves to an address of its own, or set GLOO_SOCKET_IFNAME=lo",
    )


def gpu() -> Finding:
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return fine("GPU", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}")
    if torch.version.cuda is None:
        return fine("GPU", "none in use: this is a CPU build of PyTorch")
    return Finding(
        "GPU",
        Verdict.NOTE,
        f"PyTorch is built for CUDA {torch.version.cuda} but finds no GPU",
        "see that nvidia-smi works and that the driver is new enough; CUDA_VISIBLE_DEVICES may hide GPUs",
    )


def threads() -> Finding:
    used, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if used <= cores:
        return fine("threads", f"{used} of PyTorch on {cores} cores")
    return Finding(
        "threads", Verdict.NOTE, f"{used} of PyTorch on {cores} cores", f"set OMP_NUM_THREADS to {cores} / local ranks"
    )


def predicted_cluster(given: str | None) -> Finding:
    """What schedules are made for.

    Args:
        given: a preset or a calibration's file; None for the compiler's guess.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = max(torch.cuda.device_count(), 2)
    try:
        if given is not None and Path(given).is_file():  # it knows of how many ranks it is
            ranks = max(Calibration.load(given).ranks, 2)
        cluster: Cluster = cluster_for(given, device, ranks)
    except ValueError as error:
        return Finding("cluster", Verdict.BROKEN, str(error), f"give a preset, or make a file: {TO_CALIBRATE}")
    if given is not None:
        return fine("cluster", f"schedules are made for {cluster}")
    return Finding(
        "cluster",
        Verdict.NOTE,
        f"schedules of {ranks} ranks are made for {cluster}, which is a guess",
        'measure with doctor --calibrate FILE, and give options={"cluster": FILE}',
    )


CHECKS: tuple[Callable[[], Finding], ...] = (
    python_version,
    torch_version,
    backend,
    compiler,
    inductor,
    caches,
    communication,
    exchange,
    gpu,
    threads,
)


def _run(commands: list[list[str]], environment: dict[str, str]) -> str | None:
    """Runs processes side by side; what went wrong, or None. None of them outlives the call."""
    running = [
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=DEADLINE_S)
            if process.returncode != 0:
                return f"exit status {process.returncode}: {output.strip()[-_TAIL:]}"
    except subprocess.TimeoutExpired:
        return f"no end within {DEADLINE_S:g} s"
    finally:
        for process in running:
            process.kill()
            process.wait()
    return None


def _versions(versions: tuple[tuple[int, int], ...]) -> str:
    return f"{'.'.join(map(str, versions[0]))} to {'.'.join(map(str, versions[-1]))}"
