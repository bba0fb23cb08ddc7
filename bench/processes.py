"""The rank processes of one system under test, and how the benchmark talks to them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import time
from multiprocessing import connection, context, get_context
from typing import Any

import torch
from worker import Job, Trainer, serve

GRACE_S = 5.0
"""for the other ranks once one has failed, and to end"""
LOG_TAIL = 4000

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
# What ranks import before anything is measured: it is in every system's baseline of memory, whether it compiles or not.
_IMPORTED = ["torch._inductor.compile_fx", "torch.distributed.fsdp", "systems", "worker"]

_context: context.SpawnContext | context.ForkServerContext
if torch.backends.cuda.is_built():  # it asks for GPUs as it is imported, and can't use them after a fork
    _context = get_context("spawn")
else:  # forked from one process that has imported everything, ranks start at once
    _context = get_context("forkserver")
    _context.set_forkserver_preload(_IMPORTED)


class RanksFailed(Exception):
    """A rank raised, died, or did not answer in time; the message says which, with tracebacks or stacks."""


class Ranks:
    """The processes of one contender."""

    def __init__(self, job: Job, kind: type[Trainer] = Trainer) -> None:
        self.job = job
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(job.ranks):
            pipe, remote = _context.Pipe()
            process = _context.Process(target=_serve, args=(remote, kind, job, rank), daemon=True)
            process.start()
            remote.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def ask(self, order: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's trainer; returns the results by rank.

        Raises RanksFailed if a rank raises, dies, or does not answer before the deadline.
        """
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # shows when its answer is read
                pipe.send((order, args))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + self.job.deadline_s
        waiting = set(range(len(self.pipes)))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in connection.wait([self.pipes[rank] for rank in waiting], left):
                rank = next(rank for rank in waiting if self.pipes[rank] is ready)
                waiting.remove(rank)
                succeeded, answer = self._receive(rank)
                (answers if succeeded else failures)[rank] = answer
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting or failures:
            raise RanksFailed(self._report(order, waiting, failures))
        return [answers[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(GRACE_S)
            code = self.processes[rank].exitcode
            return False, f"the process died (exit code {code})\n{self._log_tail(rank)}"

    def _report(self, order: str, waiting: set[int], failures: dict[int, str]) -> str:
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # writes its stacks to its log
        if waiting:
            time.sleep(0.5)
        parts = [f"[rank {rank}] {order}: {failures[rank].strip()}" for rank in sorted(failures)]
        for rank in sorted(waiting):
            parts.append(
                f"[rank {rank}] {order}: no answer (deadline {self.job.deadline_s:g} s, or {GRACE_S:g} s after "
                f"another rank failed). Its stacks:\n{self._log_tail(rank)}"
            )
        return "\n".join(parts)

    def _log_tail(self, rank: int) -> str:
        log = self.job.log(rank)
        return log.read_text(errors="replace")[-LOG_TAIL:].strip() if log.exists() else ""

    def close(self) -> None:
        """Ends the processes: by the end of their pipes, or after GRACE_S by force."""
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _serve(*args: Any) -> None:
    for module in _IMPORTED:
        importlib.import_module(module)
    serve(*args)
