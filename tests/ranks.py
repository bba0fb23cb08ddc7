"""Runs test functions on real ranks: persistent worlds of processes joined over gloo on this machine.

    results = run_on_ranks(4, fn, *args)    # a module-level function; what it returned on each rank

    @on_ranks(2, 4)                         # a test whose body runs on every rank of two worlds
    def test_full_tensor(): ...

    done = run_command("train", "--ranks", "2")     # python -m vescale_compile train --ranks 2

Functions are called after ``init_process_group``, with the seed reset. Worlds are started once for each
size and kept until :func:`shut_down`, which ends each file of tests; one in which a rank raised, died or ran past the
deadline is shut down at once, after every rank's Python stack has been collected.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from linking import link_quickly

from vescale_compile.frames import roomy

DEFAULT_DEADLINE_S = 120.0
GRACE_S = 3.0  # for the other ranks, once one has failed
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
COLLECT_EVERY = 10  # tests of a rank; it takes as long as a small test

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"  # of the ranks, which inherit it

# Of pytest's workers, and of the ranks, which are forked from what imports this. Compilation makes many objects and few
# cycles, and would spend a twentieth of its time on looking for them.
gc.set_threshold(20_000)
torch._dynamo.config.run_gc_after_compile = False
# Nor is there anything to learn from how long guards take, which Dynamo times with the CPU's caches emptied.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

link_quickly()

# One server process imports torch; ranks are forked from it, which takes milliseconds where an import takes
# seconds.
_context = get_context("forkserver")
_PRELOADED = [
    *("vescale_compile", "vescale_compile.sharding", "vescale_compile.backend"),
    *("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.debug", "pytest"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt_oss.modeling_gpt_oss"),
    "first_compilation",
]


@functools.cache
def _start_server() -> None:
    """Once. There is one server in a process, which may be a benchmark's by now, with what that has preloaded."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    _context.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11's does not take over sys.path, and silently passes over modules it can't find.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


class RanksFailed(AssertionError):
    """A rank raised, died, or did not answer in time; the message holds every rank's traceback or stack."""


def run_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, deadline_s: float = DEFAULT_DEADLINE_S
) -> list[Any]:
    """Calls ``fn(*args)`` on `world_size` ranks and returns what each returned, by rank.

    Raises RanksFailed if a rank raises, dies, or is not done within `deadline_s` seconds.
    """
    world = _worlds.get(world_size)
    if world is None:
        world = _worlds[world_size] = _World(world_size)
    try:
        return world.run(fn, args, deadline_s)
    except BaseException:
        _worlds.pop(world_size).kill()
        raise


def on_ranks(*world_sizes: int, deadline_s: float = DEFAULT_DEADLINE_S) -> Callable[..., Any]:
    """Makes a test of a function, once for each world size: its body runs on every rank.

    Its own parameters are filled by ``pytest.mark.parametrize`` and fixtures as usual, and are pickled.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @pytest.mark.parametrize("world_size", world_sizes)
        @functools.wraps(body)
        def test(world_size: int, **params: Any) -> None:
            run_on_ranks(world_size, _run_body, body.__module__, body.__name__, params, deadline_s=deadline_s)

        parameters = [*inspect.signature(body).parameters.values()]
        world_size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*parameters, world_size])  # type: ignore[attr-defined]
        return test

    return decorate


def run_command(*arguments: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
    """``python -m vescale_compile ARGUMENTS`` in a process that has imported PyTorch already: see `run_forked`."""
    return run_forked(_command, arguments, deadline_s=deadline_s)


def run_forked(
    main: Callable[[tuple[str, ...]], object], arguments: tuple[str, ...], *, deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Ends with the status that ``main(arguments)`` exits with or returns, in a process forked from the server.

    Raises subprocess.TimeoutExpired, having killed it and the ranks that it started, after `deadline_s` seconds.
    """
    _start_server()
    with tempfile.TemporaryDirectory(prefix="command-") as directory:
        output, errors = Path(directory, "stdout"), Path(directory, "stderr")
        process = _context.Process(target=_run_main, args=(main, arguments, output, errors))
        process.start()
        process.join(deadline_s)
        if process.exitcode is None:
            assert process.pid is not None
            process.terminate()  # a benchmark ends its ranks then, which are in no group of its own
            process.join(2 * GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, deadline_s, output.read_text(), errors.read_text())
        return subprocess.CompletedProcess(arguments, process.exitcode, output.read_text(), errors.read_text())


def _command(arguments: tuple[str, ...]) -> int:
    from vescale_compile.__main__ import main

    return main(arguments)


def _run_main(
    main: Callable[[tuple[str, ...]], object], arguments: tuple[str, ...], output: Path, errors: Path
) -> None:
    os.setsid()  # the ranks that a command forks are in its group
    # A benchmark's are forked from the same server. It has inherited the address, and would start another all the same.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.exit(main(arguments))


def _run_body(module: str, name: str, params: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**params)


def initialize_again(store: Path) -> None:
    """Ends this rank's process group and begins another, of the same ranks, over a file."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    shared = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a world whose collectives do nothing: for shapes, graphs and plans."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _World:
    """`world_size` processes in one process group, each waiting on its pipe for the next function."""

    def __init__(self, world_size: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        _start_server()
        for rank in range(world_size):
            pipe, remote = _context.Pipe()
            process = _context.Process(target=_serve, args=(remote, rank, world_size, self.directory.name), daemon=True)
            process.start()
            remote.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], deadline_s: float) -> list[Any]:
        task = pickle.dumps((sys.path, pickle.dumps((fn, args))))
        for pipe in self.pipes:
            # A dead rank shows when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(task)
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + deadline_s
        while (waiting := self._waiting(answers, failures)) and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait([self.pipes[rank] for rank in waiting], left):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    succeeded, answer = pickle.loads(self.pipes[rank].recv_bytes())
                except EOFError:
                    self.processes[rank].join(GRACE_S)
                    succeeded, answer = False, f"the process died (exit code {self.processes[rank].exitcode})"
                if succeeded:
                    answers[rank] = answer
                else:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting or failures:
            raise RanksFailed(self._report(fn, waiting, failures, deadline_s))
        return [answers[rank] for rank in range(len(self.pipes))]

    def _waiting(self, answers: dict[int, Any], failures: dict[int, str]) -> list[int]:
        return [rank for rank in range(len(self.pipes)) if rank not in answers and rank not in failures]

    def _report(self, fn: Callable[..., Any], waiting: list[int], failures: dict[int, str], deadline_s: float) -> str:
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handlers write to the logs read below
        ranks = f"{getattr(fn, '__qualname__', fn)} on {len(self.pipes)} ranks"
        parts = [f"{ranks}: failed on {sorted(failures)}, no answer from {waiting} (deadline {deadline_s:g} s)"]
        parts += [f"--- rank {rank} failed ---\n{failures[rank]}" for rank in sorted(failures)]
        for rank in range(len(self.pipes)):
            log = Path(self.directory.name, f"rank{rank}.log")
            text = log.read_text(errors="replace")[-6000:] if log.exists() else ""
            if text:
                parts.append(f"--- rank {rank} output{' and stack' if rank in waiting else ''} ---\n{text}")
        return "\n".join(parts)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.directory.cleanup()


_worlds: dict[int, _World] = {}


@atexit.register
def shut_down() -> None:
    """Ends every world's processes."""
    while _worlds:
        _worlds.popitem()[1].kill()


def _serve(pipe: connection.Connection, rank: int, world_size: int, directory: str) -> None:
    log = open(Path(directory, f"rank{rank}.log"), "w", buffering=1)  # noqa: SIM115  (open as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of threads that run no Python, too
    faulthandler.enable(file=log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = dist.FileStore(str(Path(directory, "store")), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    for count in itertools.count(1):
        try:
            task = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(task))
        if count % COLLECT_EVERY == 0:
            gc.collect()


def _answer(task: bytes) -> bytes:
    """The pickled ``(True, result)`` of a task, or ``(False, traceback)``."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        sys.path[:], call = pickle.loads(task)  # the function's module may need the parent's path
        fn, args = pickle.loads(call)
        return pickle.dumps((True, roomy(fn)(*args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
