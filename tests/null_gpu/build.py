"""A library that stands in for a GPU's: under it a build of PyTorch with CUDA runs on a machine that has none.

Everything up to the GPU is real: PyTorch's kernels and Triton's are compiled and launched, its caching allocator and
its NCCL process groups work, on streams and with events. What they call does nothing, and writes down that it was
called. Tensors hold anything; memory, launches and their order are those of a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
PYTORCH = Path(torch.__file__).parent / "lib"
CALLERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libtorch_cpu.so")
CALLED = re.compile("_*cuda|cu(blas|dnn|sparse|solver|rand|fft|File|pti)|nccl|nvrtc")


def build(folder: Path) -> dict[str, str]:
    """Compiles the library into a folder; returns the environment that puts it in the place of CUDA's."""
    packages = PYTORCH.parents[1]
    cuda = next(packages.glob("nvidia/*/include/cuda.h"))
    # CUDA's own package lacks some headers that it includes; Triton has them.
    headers = [cuda.parent, packages / "triton/backends/nvidia/include"]
    objects = [_compiled(source, folder, headers) for source in sorted(SOURCES.glob("*.c"))]
    called = {name for library in CALLERS for name in _symbols(PYTORCH / library, "U") if CALLED.match(name)}
    declared = set(re.findall(r"\bcu[A-Z]\w*", cuda.read_text()))  # the driver's, which are called by name
    missing = sorted((called | declared).difference(*(_symbols(path, "T") for path in objects)))
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    made = folder / "libcuda.so.1"  # by this name the driver is looked for
    parts = [str(path) for path in (*objects, _compiled(rest, folder))]
    subprocess.run(["gcc", "-shared", f"-Wl,-soname,{made.name}", "-o", str(made), *parts, "-ldl"], check=True)
    told = folder / "nvidia-smi"  # asked by Triton for the clock rate, in MHz
    told.write_text("#!/bin/sh\necho 1980\n")
    told.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {"LD_PRELOAD": str(made), "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "PATH": path}


def python(environment: dict[str, str], script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, which must succeed, in an environment, of null GPUs perhaps. It can import what tests can."""
    paths = [environment.get("PYTHONPATH", ""), *sys.path]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def _compiled(source: Path, folder: Path, headers: Sequence[Path] = ()) -> Path:
    made = folder / f"{source.stem}.o"
    include = [f"-I{path}" for path in headers]
    subprocess.run(
        ["gcc", "-O1", "-fPIC", "-fno-builtin", "-w", *include, "-c", str(source), "-o", str(made)], check=True
    )
    return made


def _symbols(path: Path, kind: str) -> set[str]:
    """Of a library or an object those that it lacks (U), or has (T)."""
    dynamic = ["-D"] if path.suffix == ".so" else []
    lines = subprocess.run(["nm", *dynamic, str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.split()[-2] == kind}
