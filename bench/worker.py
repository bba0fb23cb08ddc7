"""One rank of one system under test: a process that trains when it is told to, and else sleeps on its pipe."""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import nothing
import torch
import torch.distributed as dist
import wire
from profiling import StepProfile, profiled
from states import state_bytes
from systems import SYSTEMS
from torch import Tensor
from torch.distributed.tensor import DTensor
from workload import Policy, Workload


@dataclass(frozen=True)
class Job:
    """What a rank's process is given.

    Attributes:
        ranks: processes.
        fake_world: if not None, the only process is rank 0 of that many, and its collectives send nothing.
        folder: of this system alone, for its rendezvous and logs.
        start: names one start of the processes; what a start compiles, later ones find in the caches.
        wire: joins the hosts that the ranks are on; None for one host.
        deadline_s: of each collective.
        own_cache: what Inductor compiles is kept in `folder`, and nothing is found that another system or an earlier
            run compiled. False where it makes no difference how long compilation takes.
    """

    system: str
    policy: Policy
    workload: Workload
    ranks: int
    fake_world: int | None
    threads: int
    folder: str
    start: str
    wire: wire.Wire | None
    deadline_s: float
    own_cache: bool = True

    @property
    def world_size(self) -> int:
        """Ranks that the systems see."""
        return self.ranks if self.fake_world is None else self.fake_world

    def log(self, rank: int) -> Path:
        """Where a rank's output goes."""
        return Path(self.folder, f"{self.start}-rank{rank}.log")


class Step(NamedTuple):
    """One training step on one rank; times in seconds."""

    start: float
    stop: float
    """both on the machine's monotonic clock, which all its processes share"""
    cpu: float
    """CPU time of all the process's threads, which other load on the machine hardly changes"""
    loss: float


def duration(steps: Sequence[Step]) -> float:
    """Of one step on all ranks, from the first one's start to the last one's end."""
    return max(step.stop for step in steps) - min(step.start for step in steps)


class FirstStep(NamedTuple):
    """The first training step, and the norm of its whole reduced gradient."""

    step: Step
    gradient_norm: float


class Memory(NamedTuple):
    """Bytes: resident set of the process on a CPU, what PyTorch's allocator has reserved on a GPU."""

    baseline: int
    """before the model was built: the interpreter, PyTorch with its compiler, the process group"""
    peak: int
    """since the process began: building, compilation and steps"""
    peak_of_steps: int
    """of the timed steps alone"""


class Trainer:
    """A rank's orders; ``serve`` calls these methods by name."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.device = torch.device("cpu")
        if job.workload.device == "cuda":
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)

    def join(self) -> None:
        """Joins the process group."""
        job = self.job
        if job.fake_world is None:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"file://{job.folder}/{job.start}-rendezvous",
                rank=self.rank,
                world_size=job.ranks,
                timeout=timedelta(seconds=job.deadline_s),
                device_id=self.device if self.device.type == "cuda" else None,
            )
        else:
            nothing.join(job.fake_world)
        dist.barrier()

    def build(self) -> None:
        """Joins the process group, builds the model and distributes it."""
        job = self.job
        self.join()
        self._baseline = self._memory_now()
        self._peak = 0
        self.model = job.workload.build_model()
        self.batch = job.workload.build_batch(self.rank)
        self.set_up()

    def set_up(self) -> None:
        """Distributes the model as the system does, and makes its optimizer."""
        workload = self.job.workload
        self.forward = SYSTEMS[self.job.system].distribute(self.model, workload, self.job.policy)
        self.optimizer = workload.build_optimizer(self.model)

    def first_step(self) -> FirstStep:
        """As ``step``. Its gradients are those of parameters that all systems still have alike, and their norm shows
        a wrong scale, which Adam would hide from the losses."""
        norm = math.nan

        def train() -> Tensor:
            nonlocal norm
            loss = self.gradients()
            total = torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
            norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
            self._update()
            return loss

        return FirstStep(self.timed(train), norm)

    def step(self) -> Step:
        """One training step, begun by all ranks together."""
        return self.timed(self._train)

    def timed(self, work: Callable[[], Tensor]) -> Step:
        """What ``work`` takes, which returns the step's loss, from when all ranks are there."""
        dist.barrier()
        self._synchronize()
        start, cpu_start = time.monotonic(), time.process_time()
        loss = work()
        self._synchronize()
        return Step(start, time.monotonic(), time.process_time() - cpu_start, loss.item())

    def start_measuring_memory(self) -> None:
        """Forgets the peak so far, for ``memory`` to tell that of the steps to come."""
        self._peak = self._memory_peak()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what was free when the model had been built
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            # proc(5): 5 resets the peak resident set size, which getrusage reports too.
            Path("/proc/self/clear_refs").write_text("5")

    def memory(self) -> Memory:
        """Memory since ``start_measuring_memory``."""
        of_steps = self._memory_peak()
        return Memory(self._baseline, max(self._peak, of_steps), of_steps)

    def profile(self) -> StepProfile:
        """What one more training step does."""
        return profiled(self._train, self.job.world_size, self.device)

    def planned_bytes(self) -> int | None:
        """What the system said before the first step that a step would take, and the optimizer's states."""
        plan = SYSTEMS[self.job.system].planned_bytes
        if plan is None:
            return None
        return plan(self.forward) + state_bytes([self.optimizer])

    def loss(self) -> float:
        """At the parameters as they are now, which it does not change."""
        loss = self.gradients()
        self.optimizer.zero_grad()
        return loss.item()

    def leave(self) -> None:
        """Leaves the process group."""
        dist.destroy_process_group()

    def _train(self) -> Tensor:
        loss = self.gradients()
        self._update()
        return loss

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> Tensor:
        """Forward and backward of each micro-batch; returns the loss, which they have in common."""
        for _ in range(self.job.workload.micro_batches - 1):
            accumulating = SYSTEMS[self.job.system].accumulating
            assert accumulating is not None
            with accumulating(self.forward, self.model, self.job.policy):
                self._micro_batch()
        return self._micro_batch()

    def _micro_batch(self) -> Tensor:
        loss = self.forward(*self.batch)
        loss.backward(torch.full_like(loss, 1 / self.job.workload.micro_batches))
        return loss.detach()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _memory_now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_reserved(self.device)
        resident_pages = Path("/proc/self/statm").read_text().split()[1]
        return int(resident_pages) * resource.getpagesize()

    def _memory_peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(pipe: Connection, kind: type[Trainer], job: Job, rank: int) -> None:
    """Obeys orders from the pipe until it is closed: names of the trainer's methods with arguments, answered
    by (done, result).

    An exception is answered by (False, traceback) and ends the process: its system has failed.
    """
    log = open(job.log(rank), "w", buffering=1)  # noqa: SIM115  (open as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    # Before anything opens a socket. The interface is named, or gloo would ask for the address of the host's name.
    if job.wire is not None:
        wire.enter(job.wire.host_of(rank, job.ranks))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if job.wire is None else wire.INTERFACE
    if job.own_cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(job.folder, "inductor"))
    torch.set_num_threads(job.threads)
    trainer: Trainer | None = None
    while True:
        try:
            order, args = pipe.recv()
        except EOFError:
            return
        try:
            trainer = trainer or kind(job, rank)
            answer: tuple[bool, Any] = (True, getattr(trainer, order)(*args))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
        pipe.send(answer)
