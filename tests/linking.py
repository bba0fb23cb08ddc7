"""Links the kernels of Inductor against stand-ins for PyTorch's libraries, of the same names but without symbols.

A third of a kernel's compilation is spent reading the symbols of libraries that are in the process already, where the
loader finds them by their names. g++ looks for its linker in ``COMPILER_PATH`` first.
"""

import atexit
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

LIBRARIES = ("torch", "torch_cpu", "torch_python")
LINKER = """#!/bin/sh
case "$* " in *" -ltorch_cpu "*) set -- --no-as-needed {libraries} -L{folder} "$@";; esac
exec {linker} "$@"
"""


def link_quickly() -> None:
    """All that this process and its children compile from now on."""
    linker = shutil.which("ld")
    if linker is None or shutil.which("g++") is None or "COMPILER_PATH" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="linker-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = [f"{folder}/lib{name}.so" for name in LIBRARIES]
    for path in paths:
        name = f"-Wl,-soname,{Path(path).name}"
        subprocess.run(["g++", "-shared", "-nostdlib", "-x", "c++", "/dev/null", name, "-o", path], check=True)
    script = Path(folder, "ld")
    script.write_text(LINKER.format(libraries=" ".join(paths), folder=folder, linker=linker))
    script.chmod(0o755)
    os.environ["COMPILER_PATH"] = folder
