"""The list scheduler: walks through the computation once and launches what a policy prefers and memory allows.

Before each compute task it gives the wire work that lasts until the task will be over. A launch must leave room for
all that is still to come in its most frugal form (what is in flight waited for, each gather just before it is read,
each reduction waited for at once), so the walk never runs into a dead end. Reductions are waited for where their
buffers and their scratch are needed: those that are done already whenever that makes room for a launch, others only
when the next compute task would not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vescale_compile.schedule.jobs import Grouping, Job, make_jobs, synchronous
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.machine import Machine
from vescale_compile.schedule.policies import Policy

_LOOKED_AT = 4  # gathers that an impatient walk considers


@dataclass(frozen=True)
class Frame:
    """What all schedules under one choice of kept outputs and groups share. Bytes are by position.

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
    least: tuple[int, ...]
    between: tuple[int, ...]
    running: tuple[int, ...]
    after: tuple[int, ...]

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
            written = lifetimes.inputs_at[position]
            running.append(written + compute.live_bytes)
            after.append(written - lifetimes.outputs_after[position] + graph.live_before(position + 1))
        return cls(
            lifetimes=lifetimes,
            jobs=jobs,
            due=tuple(map(tuple, due)),
            becomes_ready=tuple(map(tuple, ready)),
            least=synchronous(lifetimes, jobs)[1],
            between=tuple(map(graph.live_before, range(len(graph.compute) + 1))),
            running=tuple(running),
            after=tuple(after),
        )


def list_schedule(
    frame: Frame, budget: int, policy: Policy, *, ahead: int, patient: bool, limit: float = math.inf
) -> Machine | None:
    """Schedules the jobs of ``frame`` by ``policy``.

    Args:
        budget: bytes that no instruction may exceed.
        policy: which job goes first.
        ahead: how many collectives may have been launched before the compute task that waits for them is next.
        patient: whether the wire waits for the preferred job where that does not fit yet, or takes the next one.
        limit: seconds; a program that can't but take longer is of no interest.

    Returns:
        The machine after the program; None if it exceeds the budget or the limit.
    """
    if max(frame.least) > budget:
        return None
    walk = _Walk(frame, budget, policy, ahead, patient)
    for position in range(len(frame.least)):
        walk.step(position)
        if walk.least_makespan() > limit:
            return None
    walk.finish()
    return walk.machine if walk.machine.peak <= budget else None


class _Walk:
    def __init__(self, frame: Frame, budget: int, policy: Policy, ahead: int, patient: bool) -> None:
        self.frame, self.budget, self.policy, self.ahead, self.patient = frame, budget, policy, ahead, patient
        self.machine = Machine(frame.lifetimes)
        self.elapsed = frame.lifetimes.graph.elapsed
        # Bytes by position: the least, and what launches ahead of time add to it.
        self.reserved = list(frame.least)
        self.free = [job for job in reversed(frame.jobs) if not job.ready]  # the earliest deadline last
        self.written: list[Job] = []  # what has been written and not launched
        self.flying: list[Job] = []  # launched and not waited for, in launch order
        self.early = 0  # of them, those that a compute task later than the next one waits for
        self.returning = 0  # bytes that the waits for them will give back
        self.returning_at = [0] * (len(frame.least) + 1)  # of which before each position
        self.to_carry = sum(job.duration for job in frame.jobs)  # seconds of the wire, for launches that are to come
        self.launches = sum(job.launch for job in frame.jobs)  # seconds that those launches take

    def least_makespan(self) -> float:
        """Seconds that the program will take at least."""
        to_do = self.elapsed[-1] - self.elapsed[self.machine.position] + self.launches
        return self.machine.now + max(to_do, self.to_carry + self.machine.backlog(), 0.0)

    def step(self, position: int) -> None:
        """Schedules all up to the end of one compute task."""
        due = self.frame.due[position]
        self.written += self.frame.becomes_ready[position]
        self.early -= sum(1 for job in due if not job.ready and job.transfers in self.machine.outstanding)
        self._make_room(position)
        for job in due:
            if job.transfers[0] not in self.machine.launched:
                self._launch(job, position)
        self._fill(position)
        for job in due:
            if job.transfers in self.machine.outstanding:
                self._wait(job)
        self.machine.run(position)

    def finish(self) -> None:
        """Launches what is left, and waits for all."""
        end = len(self.frame.least)
        self.written += self.frame.becomes_ready[end]
        while self.written:
            size = min(self.written, key=self._rank).taken_bytes
            self._wait_for_room(lambda size=size: size <= self._room)  # type: ignore[misc]
            self._launch(self._preferred(self.written), end)
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
        return stall + machine.graph.compute[position].duration

    def _choose(self, position: int) -> Job | None:
        candidates = self.written[:]
        if self.early < self.ahead:
            candidates += self.free[-1 if self.patient else -_LOOKED_AT :]
        for job in sorted(candidates, key=self._rank):
            if self._fits(job, position):
                return job
            if self.patient:
                return None
        return None

    def _rank(self, job: Job) -> tuple[tuple[float, ...], tuple[int, int, tuple[int, ...]]]:
        return self.policy(job, self._slack), job.order

    def _slack(self, job: Job) -> float:
        until = self.elapsed[job.deadline] - self.elapsed[self.machine.position]
        return until - self.machine.backlog() - job.duration

    def _fits(self, job: Job, position: int) -> bool:
        """Whether there is room to launch ``job`` now, once what is done has given back what it can."""
        if not job.ready and max(self.reserved[position : job.deadline]) + job.output_bytes > self.budget:
            return False
        return self._wait_for_room(lambda: self._excess(position, (job,)) <= 0, done_only=True)

    def _excess(self, position: int, launched: Sequence[Job]) -> int:
        """Bytes over budget from here to what follows the next compute task, with some more ``launched`` now."""
        frame = self.frame
        held, returning, returning_here = self.machine.held, self.returning, self.returning_at[position]
        for job in launched:
            held += job.taken_bytes
            returning += job.returned_bytes
            returning_here += job.returned_bytes if job.deadline == position else 0
        pending = [*(job for job in self.written if job not in launched), *frame.becomes_ready[position + 1]]
        after = held - returning + _one_by_one(pending)
        running = held - returning_here + frame.running[position]
        return max(held + frame.between[position], running, after + frame.after[position]) - self.budget

    def _make_room(self, position: int) -> None:
        """Waits for reductions, launching them if need be, until the next compute task fits."""
        self._wait_for_room(lambda: self._excess_with_due(position) <= 0)
        while self._excess_with_due(position) > 0 and (pending := [j for j in self.written if j.returned_bytes]):
            job = self._preferred(pending)
            self._launch(job, position)
            self._wait(job)

    def _excess_with_due(self, position: int) -> int:
        """Bytes over budget with all launched that the next compute task waits for."""
        due = self.frame.due[position]
        return self._excess(position, [job for job in due if job.transfers[0] not in self.machine.launched])

    @property
    def _room(self) -> int:
        """Bytes that a launch may take now."""
        return self.budget - self.machine.held - self.frame.between[self.machine.position]

    def _preferred(self, pending: Sequence[Job]) -> Job:
        """The first by rank of those that there is room for; where there is none, what takes the least."""
        fitting = [job for job in pending if job.taken_bytes <= self._room]
        return min(fitting, key=self._rank) if fitting else min(pending, key=lambda job: (job.taken_bytes, job.order))

    def _wait_for_room(self, enough: Callable[[], bool], *, done_only: bool = False) -> bool:
        """Waits for collectives that will give something back, in launch order, until there is enough room, and says
        whether there is."""
        if enough():
            return True
        flying = self.machine.outstanding
        for job in self.flying[:]:
            if job.returned_bytes and not (done_only and flying[job.transfers].stopped is None):
                self._wait(job)
                if enough():
                    return True
        return False

    def _launch(self, job: Job, position: int) -> None:
        if job.ready:
            self.written.remove(job)
        else:
            self.free.remove(job)
            self.early += job.deadline > position
            for later in range(position, job.deadline):
                self.reserved[later] += job.output_bytes
        self.to_carry -= job.duration
        self.launches -= job.launch
        self.machine.launch(job.transfers)
        self.flying.append(job)
        self.returning += job.returned_bytes
        self.returning_at[job.deadline] += job.returned_bytes

    def _wait(self, job: Job) -> None:
        self.machine.wait(job.transfers)
        self.flying.remove(job)
        self.returning -= job.returned_bytes
        self.returning_at[job.deadline] -= job.returned_bytes


def _one_by_one(jobs: Sequence[Job]) -> int:
    """The most bytes that launches take if each is waited for before the next; what takes the least goes first."""
    most = held = 0
    for job in sorted(jobs, key=lambda job: job.taken_bytes):
        most = max(most, held + job.taken_bytes)
        held += job.taken_bytes - job.returned_bytes
    return most
