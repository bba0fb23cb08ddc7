"""The list scheduler: walks through the computation once and launches what a policy prefers and memory allows.

Before each compute task it gives the wire work that lasts until the task will be over. A launch must leave room for
all that is still to come in its most frugal form (what is in flight waited for, each gather just before it is read,
each reduction waited for at once), so the walk never runs into a dead end. Reductions are waited for where their
buffers and their scratch are needed: those that are done already whenever that makes room for a launch, others only
when the next compute task would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_compile.schedule.graph import Bytes
from vescale_compile.schedule.jobs import Grouping, Job, make_jobs, synchronous
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine
from vescale_compile.schedule.policies import Policy

_LOOKED_AT = 4  # gathers that an impatient walk considers

Held = tuple[int, ...]
"""Bytes by position."""


@dataclass(frozen=True)
class Frame:
    """What all schedules under one choice of kept outputs and groups share. Bytes are by memory, then by position.

    Attributes:
        jobs: by deadline.
        due: by position, the jobs to be done before it; at last those that the end waits for.
        becomes_ready: by position, the jobs whose inputs have been written before it but not earlier.
        least: without which nothing works.
        between: base memory while a position's transfers are launched and waited for.
        running: on top of the buffers held then, what the compute task there needs.
        after: the same between that task and the next, but for what the launches there take.
    """

    lifetimes: Lifetimes
    jobs: tuple[Job, ...]
    due: tuple[tuple[Job, ...], ...]
    becomes_ready: tuple[tuple[Job, ...], ...]
    least: tuple[Held, Held]
    between: tuple[Held, Held]
    running: tuple[Held, Held]
    after: tuple[Held, Held]

    @classmethod
    def build(cls, lifetimes: Lifetimes, grouping: Grouping) -> Frame:
        graph, jobs = lifetimes.graph, make_jobs(lifetimes, grouping)
        due: list[list[Job]] = [[] for _ in range(len(graph.compute) + 1)]
        ready: list[list[Job]] = [[] for _ in range(len(graph.compute) + 1)]
        for job in jobs:
            due[job.deadline].append(job)
            if job.ready:
                ready[job.ready].append(job)
        running, after = [], []
        for position, compute in enumerate(graph.compute):
            written, read = lifetimes.inputs_at[position], lifetimes.outputs_after[position]
            running.append(graph.split(compute.live_bytes, written))
            after.append(graph.split(graph.between[position + 1] - read, written))
        return cls(
            lifetimes=lifetimes,
            jobs=jobs,
            due=tuple(map(tuple, due)),
            becomes_ready=tuple(map(tuple, ready)),
            least=_by_memory(synchronous(lifetimes, jobs)[1]),
            between=(graph.between, (0,) * len(graph.between)),
            running=_by_memory(running),
            after=_by_memory(after),
        )

    def limits(self, budget: int, share: float) -> Bytes | None:
        """What each memory may take of ``budget`` bytes: what it takes at least, and of the rest the first ``share``,
        all of it where the second is not used. None: there is less than the least."""
        first, second = map(max, self.least)
        spare = budget - first - second
        if spare < 0:
            return None
        first += int(share * spare) if second else spare
        return first, budget - first


class Listed(NamedTuple):
    """What the list scheduler came to.

    Attributes:
        machine: after the program; None if that exceeds the limits.
        held_back: whether ``ahead`` kept any gather from being considered. Else a larger one comes to the same.
    """

    machine: Machine | None
    held_back: bool


def list_schedule(frame: Frame, limits: Bytes, policy: Policy, *, ahead: int, patient: bool, limit: float) -> Listed:
    """Schedules the jobs of ``frame`` by ``policy``.

    Args:
        limits: bytes that no instruction may exceed, by memory; no less than the frame's least.
        policy: which job goes first.
        ahead: how many collectives may have been launched before the compute task that waits for them is next.
        patient: whether the wire waits for the preferred job where that does not fit yet, or takes the next one.
        limit: seconds; a program that can't but take longer is of no interest.
    """
    walk = _Walk(frame, limits, policy, ahead, patient)
    for position in range(walk.end):
        walk.step(position)
        if walk.least_makespan() > limit:
            return Listed(None, walk.held_back)
    walk.finish()
    fits = all(most <= allowed for most, allowed in zip(walk.machine.most, limits, strict=True))
    return Listed(walk.machine if fits else None, walk.held_back)


class _Walk:
    def __init__(self, frame: Frame, limits: Bytes, policy: Policy, ahead: int, patient: bool) -> None:
        self.frame, self.limits, self.policy, self.ahead, self.patient = frame, limits, policy, ahead, patient
        graph = frame.lifetimes.graph
        self.machine = Machine(frame.lifetimes)
        self.elapsed = graph.elapsed
        self.end = len(graph.compute)
        self.memories = range(2 if graph.apart else 1)
        # Bytes of the first memory by position: the least, and what launches ahead of time add to it.
        self.reserved = list(frame.least[0])
        self.free = [job for job in reversed(frame.jobs) if not job.ready]  # the earliest deadline last
        self.written: list[Job] = []  # what has been written and not launched
        self.flying: list[Job] = []  # launched and not waited for, in launch order
        self.early = 0  # of them, those that a compute task later than the next one waits for
        self.held_back = False  # whether there were as many as may be, and more to launch
        self.returning = [0, 0]  # bytes that the waits for them will give back, by memory
        self.returning_at = [[0] * (self.end + 1) for _ in range(2)]  # of which before each position
        self.to_carry = sum(job.duration for job in frame.jobs)  # seconds of the wire, for launches that are to come
        self.launches = sum(job.launch for job in frame.jobs)  # seconds that those launches take
        self.to_issue = graph.issued[-1] + sum(job.issue for job in frame.jobs) + graph.after  # seconds of the host

    def least_makespan(self) -> float:
        """Seconds that the program will take at least."""
        to_do = self.elapsed[-1] - self.elapsed[self.machine.position] + self.launches
        return max(self.machine.now + max(to_do, self.to_carry + self.machine.backlog(), 0.0), self.to_issue)

    def step(self, position: int) -> None:
        """Schedules all up to the end of one compute task."""
        due = self.frame.due[position]
        self.written += self.frame.becomes_ready[position]
        self.early -= sum(1 for job in due if not job.ready and job.transfers in self.machine.outstanding)
        self._make_room(position)
        for job in due:
            if not self._is_launched(job):
                self._launch(job, position)
        self._fill(position)
        for job in due:
            if job.transfers in self.machine.outstanding:
                self._wait(job)
        self.machine.run(position)

    def finish(self) -> None:
        """Launches what is left, and waits for all."""
        self.written += self.frame.becomes_ready[self.end]
        while self.written:
            first = min(self.written, key=self._rank)
            self._wait_for_room(lambda first=first: self._too_small_for(first))  # type: ignore[misc]
            self._launch(self._preferred(self.written), self.end)
        for job in list(self.flying):
            self._wait(job)

    def _fill(self, position: int) -> None:
        """Gives the wire work until the compute task at ``position``, which may have to wait, will be over."""
        while self.machine.backlog() < self._until_over(position):
            job = self._choose(position)
            if job is None:
                break
            self._launch(job, position)

    def _until_over(self, position: int) -> float:
        """Seconds until the next compute task will be over, what it waits for included."""
        machine = self.machine
        due = [job for job in self.frame.due[position] if job.transfers in machine.outstanding]
        stall = max((machine.backlog(job.transfers[0]) for job in due), default=0.0)
        compute = machine.graph.compute[position]
        return max(stall + compute.duration, machine.issued + compute.issue - machine.now)

    def _choose(self, position: int) -> Job | None:
        candidates = self.written[:]
        if self.early < self.ahead:
            candidates += self.free[-1 if self.patient else -_LOOKED_AT :]
        elif self.free:
            self.held_back = True
        if not candidates:
            return None
        by_rank = [min(candidates, key=self._rank)] if self.patient else sorted(candidates, key=self._rank)
        return next((job for job in by_rank if self._fits(job, position)), None)

    def _rank(self, job: Job) -> tuple[tuple[float, ...], tuple[int, int, tuple[int, ...]]]:
        return self.policy(job, self._slack), job.order

    def _slack(self, job: Job) -> float:
        until = self.elapsed[job.deadline] - self.elapsed[self.machine.position]
        return until - self.machine.backlog() - job.duration

    def _fits(self, job: Job, position: int) -> bool:
        """Whether there is room to launch ``job`` now, once what is done has given back what it can."""
        if not job.ready and max(self.reserved[position : job.deadline]) + job.kept_bytes > self.limits[0]:
            return False
        return self._wait_for_room(lambda: self._too_small(position, (job,)), done_only=True)

    def _too_small(self, position: int, launched: Sequence[Job]) -> int | None:
        """The memory that is too small from here to what follows the next compute task, with some more ``launched``
        now; None if neither is."""
        for memory in self.memories:
            if self._exceeds(memory, position, launched):
                return memory
        return None

    def _exceeds(self, memory: int, position: int, launched: Sequence[Job]) -> bool:
        frame, limit, held = self.frame, self.limits[memory], self.machine.held[memory]
        returning, returning_here = self.returning[memory], self.returning_at[memory][position]
        for job in launched:
            held += job.taken[memory]
            returning += job.returned[memory]
            returning_here += job.returned[memory] if job.deadline == position else 0
        if held + frame.between[memory][position] > limit:
            return True
        if held - returning_here + frame.running[memory][position] > limit:
            return True
        pending = [job for job in self.written if job not in launched]
        pending += frame.becomes_ready[position + 1]
        return held - returning + _one_by_one(pending, memory) + frame.after[memory][position] > limit

    def _make_room(self, position: int) -> None:
        """Waits for reductions, launching them if need be, until the next compute task fits."""
        due = self.frame.due[position]

        def too_small() -> int | None:
            """With all launched that the next compute task waits for."""
            return self._too_small(position, [job for job in due if not self._is_launched(job)])

        while (memory := too_small()) is not None:
            if (job := next((job for job in self.flying if job.returned[memory]), None)) is None:
                pending = [job for job in self.written if job.returned[memory]]
                if not pending:
                    break
                self._launch(job := self._preferred(pending), position)
            for other in due:  # goes over the wire while what is waited for goes over other links
                if not self._is_launched(other) and self._too_small_for(other) is None:
                    self._launch(other, position)
            self._wait(job)

    def _is_launched(self, job: Job) -> bool:
        return job.transfers[0] in self.machine.launched

    def _too_small_for(self, job: Job) -> int | None:
        """The memory in which a launch has no room now."""
        held, between, position = self.machine.held, self.frame.between, self.machine.position
        for memory in self.memories:
            if held[memory] + between[memory][position] + job.taken[memory] > self.limits[memory]:
                return memory
        return None

    def _preferred(self, pending: Sequence[Job]) -> Job:
        """The first by rank of those that there is room for; where there is none, what takes the least."""
        fitting = [job for job in pending if self._too_small_for(job) is None]
        return min(fitting, key=self._rank) if fitting else min(pending, key=lambda job: (job.size, job.order))

    def _wait_for_room(self, too_small: Callable[[], int | None], *, done_only: bool = False) -> bool:
        """Waits for collectives that will give something back to the memory that is too small, in launch order, until
        none is, and says whether that is so."""
        memory = too_small()
        for job in self.flying[:]:
            if memory is None:
                break
            if job.returned[memory] and (not done_only or self.machine.is_over(job.transfers)):
                self._wait(job)
                memory = too_small()
        return memory is None

    def _launch(self, job: Job, position: int) -> None:
        if job.ready:
            self.written.remove(job)
        else:
            self.free.remove(job)
            self.early += job.deadline > position
            for later in range(position, job.deadline):
                self.reserved[later] += job.kept_bytes
        self.to_carry -= job.duration
        self.launches -= job.launch
        self.machine.launch(job.transfers)
        self.flying.append(job)
        self._return(job, 1)

    def _wait(self, job: Job) -> None:
        self.machine.wait(job.transfers)
        self.flying.remove(job)
        self._return(job, -1)

    def _return(self, job: Job, times: int) -> None:
        """Counts what will be given back when ``job`` is waited for, or counts it no more."""
        for memory in self.memories:
            self.returning[memory] += times * job.returned[memory]
            self.returning_at[memory][job.deadline] += times * job.returned[memory]


def _one_by_one(jobs: Sequence[Job], memory: int) -> int:
    """The most bytes of a memory that launches take if each is waited for before the next; what takes the least goes
    first."""
    most = held = 0
    for job in sorted(jobs, key=lambda job: job.taken[memory]):
        held += job.taken[memory]
        if held > most:
            most = held
        held -= job.returned[memory]
    return most


def _by_memory(by_position: Sequence[Bytes]) -> tuple[Held, Held]:
    first, second = zip(*by_position, strict=True)
    return first, second
