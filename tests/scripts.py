"""Runs the benchmarks' scripts, in processes that have imported PyTorch already."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

from ranks import run_forked

BENCH = Path(__file__).parents[1] / "bench"


def run_script(script: Path, *options: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
    """``python SCRIPT OPTIONS`` and what it printed; raises subprocess.TimeoutExpired after `deadline_s` seconds."""
    return run_forked(_script, (str(script), *options), deadline_s=deadline_s)


def _script(arguments: tuple[str, ...]) -> None:
    script = ModuleType("__main__")
    script.__file__, *_ = sys.argv = [*arguments]
    sys.path.insert(0, str(Path(arguments[0]).parent))
    # As multiprocessing has it: its processes send objects of the script's classes by the second name.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = script
    exec(compile(Path(arguments[0]).read_text(), arguments[0], "exec"), vars(script))
