"""Runs the benchmarks' scripts, in processes that have imported PyTorch already."""

import runpy
import subprocess
import sys
from pathlib import Path

from ranks import run_forked

BENCH = Path(__file__).parents[1] / "bench"


def run_script(script: Path, *options: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
    """``python SCRIPT OPTIONS`` and what it printed; raises subprocess.TimeoutExpired after `deadline_s` seconds."""
    return run_forked(_script, (str(script), *options), deadline_s=deadline_s)


def _script(arguments: tuple[str, ...]) -> None:
    sys.argv = [*arguments]
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
