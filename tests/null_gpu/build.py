"""Libraries that stand in for a GPU's: under them a build of PyTorch with CUDA runs on a machine that has none.

Everything up to the GPU is real: PyTorch's kernels and Triton's are compiled and launched, its caching allocator and
its NCCL process groups work, on streams and with events. What they call does nothing, and writes down that it was
called. Tensors hold anything; memory, launches and their order are those of a GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
PYTORCH = Path(torch.__file__).parent / "lib"
CALLERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libtorch_cpu.so")
CALLED = re.compile("_*cuda|cu(blas|dnn|sparse|solver|rand|fft|File|pti)|nccl|nvrtc")


def build(folder: Path) -> dict[str, str]:
    """Compiles the libraries into a folder; returns the environment that puts them in the place of CUDA's."""
    packages = PYTORCH.parents[1]
    cuda = next(packages.glob("nvidia/*/include/cuda.h"))
    # CUDA's own package lacks some headers that it includes; Triton has them.
    headers = [cuda.parent, packages / "triton/backends/nvidia/include"]
    runtime = [_compiled(SOURCES / name, folder, headers) for name in ("runtime.c", "libraries.c")]
    called = {name for library in CALLERS for name in _symbols(PYTORCH / library, "U") if CALLED.match(name)}
    preloaded = _linked("libnull_gpu.so", runtime, called, folder)
    driver = _compiled(SOURCES / "driver.c", folder, headers)
    declared = set(re.findall(r"\bcu[A-Z]\w*", cuda.read_text()))
    _linked("libcuda.so.1", [driver], declared, folder)
    return {"LD_PRELOAD": str(preloaded), "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder)}


def _compiled(source: Path, folder: Path, headers: Sequence[Path] = ()) -> Path:
    made = folder / f"{source.stem}.o"
    include = [f"-I{path}" for path in headers]
    subprocess.run(
        ["gcc", "-O1", "-fPIC", "-fno-builtin", "-w", *include, "-c", str(source), "-o", str(made)], check=True
    )
    return made


def _linked(name: str, objects: Sequence[Path], called: Iterable[str], folder: Path) -> Path:
    """A library of the objects, and of functions that do nothing and succeed by what other names are called."""
    missing = sorted(set(called).difference(*(_symbols(path, "T") for path in objects)))
    rest = folder / f"{name}.rest.c"
    rest.write_text("".join(f"int {each}(void) {{ return 0; }}\n" for each in missing))
    made = folder / name
    parts = [str(path) for path in (*objects, _compiled(rest, folder))]
    subprocess.run(["gcc", "-shared", f"-Wl,-soname,{name}", "-o", str(made), *parts, "-ldl"], check=True)
    return made


def _symbols(path: Path, kind: str) -> set[str]:
    """Of a library or an object those that it lacks (U), or has (T)."""
    dynamic = ["-D"] if path.suffix == ".so" else []
    lines = subprocess.run(["nm", *dynamic, str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.split()[-2] == kind}
