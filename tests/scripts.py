"""Runs the benchmarks' scripts as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"


def run_script(script: Path, *options: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
    """One thread, and what was printed; raises subprocess.TimeoutExpired after `deadline_s` seconds."""
    return subprocess.run(
        [sys.executable, str(script), *options],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
