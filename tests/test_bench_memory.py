"""`python bench/memory.py`: what a process holds, and how its growth is split."""

import ctypes
import json
import sys
from pathlib import Path

import pytest
from scripts import BENCH, run_script

sys.path.append(str(BENCH))

import held
from copies import Copies
from memory import Split, table
from profiling import StepProfile
from workload import Policy

MB = 10**6


def test_what_malloc_gives_out_is_in_blocks_and_is_resident_once_written() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim(0)  # or it might give out what other tests have freed, and the heap has kept in memory
    before = held.held()
    memory = libc.malloc(64 * MB)
    given = held.held()
    ctypes.memset(memory, 1, 64 * MB)
    written = held.held()
    libc.free(memory)
    after = held.held()
    assert given.blocks - before.blocks == pytest.approx(64 * MB, rel=0.05)
    assert given.resident - before.resident < 8 * MB
    assert written.resident - given.resident == pytest.approx(64 * MB, rel=0.1)
    assert after.blocks - before.blocks < 8 * MB


def test_small_python_objects_are_in_use_until_they_are_dropped() -> None:
    before = held.held()
    kept = [float(number) for number in range(400_000)]  # of 24 bytes, in blocks of 32 or less
    full = held.held()
    del kept
    after = held.held()
    assert full.objects - before.objects == pytest.approx(400_000 * 24, rel=0.35)
    assert after.objects - before.objects < MB
    assert after.arenas - full.arenas > 0 or after.resident < full.resident


def test_what_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_written_to_stderr", lambda: "another allocator's words")
    with pytest.raises(RuntimeError, match=r"what this process holds can't be told"):
        held.held()


def profile(before: int, peak: int) -> StepProfile:
    return StepProfile({}, Copies(copied_bytes=0, copy_in_bytes=0, cast_bytes=0), before, peak, None)


def test_the_parts_add_up_to_what_the_process_has_grown_by() -> None:
    before = held.Held(resident=100 * MB, files=10 * MB, objects=20 * MB, arenas=1 * MB, blocks=30 * MB)
    after = held.Held(resident=180 * MB, files=13 * MB, objects=26 * MB, arenas=3 * MB, blocks=90 * MB)
    split = Split.of(before, after, 200 * MB, profile(before=50 * MB, peak=70 * MB))
    assert split == Split(70 * MB, 3 * MB, 6 * MB, 2 * MB, 10 * MB, 9 * MB)
    assert split.grown == 100 * MB
    (row,) = table({("ours", Policy.KEEP): split}).splitlines()[2:]
    assert row == "| ours | keep | 100 | 70 | 3 | 6 | 2 | 10 | 9 |"


@pytest.mark.slow
def test_a_run_splits_the_memory_of_each_system(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    chosen = ("--systems", "fsdp2,vescale-eager-lowering", "--policies", "keep")
    tiny = ("--model", "tiny", "--seq", "8", "--warmup", "1", "--steps", "2")
    done = run_script(BENCH / "memory.py", *chosen, *tiny, "--json", str(path), deadline_s=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["bytes"]
    assert [(row["system"], row["policy"]) for row in rows] == [("fsdp2", "keep"), ("vescale-eager-lowering", "keep")]
    assert all(row["tensors"] > 3 * 4 * 47264 / 2 for row in rows)  # a rank's parameters and two moments
    eager, compiled = rows
    assert compiled["objects"] > eager["objects"] > 0  # the compiler's
