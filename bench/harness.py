"""Measures systems side by side: all alive in processes of their own, one of them at work at a time.

Each contender (a system under a policy) has its own rank processes and process group, and so memory and
compiler caches of its own. All contenders stay alive for the whole run. Warm-up steps, in which they compile,
are taken by one contender after another; then the timed steps go round: every contender takes two steps while
the ranks of the others sleep on their pipes, and each round starts with another contender. Whatever else the
machine does meets all of them alike, within seconds, which longer blocks of steps would not give: they last
longer than the disturbances. The first of the two is not timed: it finds the processor's caches full of what
others have computed, as no step of a training does. The price is that the memory of all must fit at once; choose
fewer systems where it does not. At the end each contender is measured apart: memory, one profiled step, what it has
learned; and its processes are started again, a few times in turns with the others', to see how long compilation takes
with the caches that the first start has filled.

A system that raises, dies or passes a deadline is ended, and reported with what its ranks said; the others go
on without it. Linux only: memory is read from /proc.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import Ranks, RanksFailed
from profiling import StepProfile
from wire import Wire
from worker import FirstStep, Job, Memory, Step, Trainer, duration
from workload import Policy, Workload


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        warmup: steps before the timed ones, in which systems compile.
        steps: timed steps; before each one that is not.
        ranks: processes for each contender.
        fake_world: if not None, one process for each contender is rank 0 of that many, and its collectives send
            nothing: memory, copies and kernels are real, results are not.
        threads: of each rank's operators.
        wire: what joins the hosts that the ranks are on; None for one host.
        deadline_s: seconds for each order to the ranks (build, step, ...) and for each collective.
        warm_starts: how often the processes are started again on the caches that the first start filled.
        cold_starts: how often they are started without, the first time among them.
    """

    warmup: int
    steps: int
    ranks: int
    fake_world: int | None
    threads: int
    wire: Wire | None
    deadline_s: float
    warm_starts: int = 1
    cold_starts: int = 1


@dataclass
class Result:
    """What was measured of one contender. Times in seconds, memory in bytes, lists of ranks by rank."""

    system: str
    policy: Policy
    warmup_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    steps_cpu_s: list[float] = field(default_factory=list)
    """CPU time of the same steps, the mean over the ranks"""
    losses: list[float] = field(default_factory=list)
    """of every step, warm-up included; the mean over the ranks"""
    final_loss: float | None = None
    """at the parameters after all steps, the mean over the ranks"""
    gradient_norm: float | None = None
    """of the averaged gradient of the first step"""
    planned_bytes: int | None = None
    """what the system promised that rank 0 would take, and the optimizer's states"""
    memory: list[Memory] = field(default_factory=list)
    profile: StepProfile | None = None
    """of one step of rank 0"""
    warm_warmups_s: list[list[float]] = field(default_factory=list)
    """the warm-up steps of each later start, with the caches of the first"""
    cold_warmups_s: list[list[float]] = field(default_factory=list)
    """the same of each later start without"""
    error: str | None = None

    @property
    def name(self) -> str:
        """For messages: the system, and the policy if it has a choice."""
        return self.system if self.policy is Policy.REPLICATED else f"{self.system} ({self.policy})"

    @property
    def median_s(self) -> float:
        """The median timed step."""
        return statistics.median(self.steps_s)

    @property
    def peak_bytes(self) -> int:
        """Memory of the fullest rank above its baseline."""
        return max(memory.peak - memory.baseline for memory in self.memory)

    @property
    def compile_s(self) -> float:
        """What the warm-up steps took longer than as many median steps: compilation and first-use work. The median of
        all starts with empty caches."""
        return statistics.median(map(self._above_steps, [self.warmup_s, *self.cold_warmups_s]))

    @property
    def warm_compile_s(self) -> float:
        """The same of later starts, with the caches of the first: the median."""
        return statistics.median(map(self._above_steps, self.warm_warmups_s))

    def _above_steps(self, warmup_s: Sequence[float]) -> float:
        return max(0.0, sum(warmup_s) - len(warmup_s) * self.median_s)


def measure(
    contenders: Sequence[tuple[str, Policy]], workload: Workload, plan: Plan, say: Callable[[str], None]
) -> list[Result]:
    """Runs all contenders, interleaved, and returns their results in the order given.

    Args:
        contenders: names of systems, each with one of its policies.
        workload: what they train.
        plan: how many steps, on how many ranks.
        say: called with a line on progress now and then.
    """
    runs = [Run(Result(system, policy)) for system, policy in contenders]
    with taken_in_turns(runs, workload, plan, say) as folder:
        for turn in range(plan.warm_starts):
            for run in runs:
                run.start_again(f"warm{turn}", plan.warmup, say)
        for turn in range(1, plan.cold_starts):
            for index, run in enumerate(runs):
                empty = folder / f"{index}-cold{turn}"
                empty.mkdir()
                run.start_again(f"cold{turn}", plan.warmup, say, empty)
    return [run.result for run in runs]


@contextlib.contextmanager
def taken_in_turns(runs: Sequence[Run], workload: Workload, plan: Plan, say: Callable[[str], None]) -> Iterator[Path]:
    """All contenders' steps, interleaved, and what is measured after them; the processes end with the context, and the
    folder that it gives, which has theirs."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        for run in runs:
            stack.callback(run.close)
        for index, run in enumerate(runs):
            say(f"{run.result.name}: building and warming up")
            with run.failing_alone(say):
                run.start(_job(run.result, workload, plan, folder / str(index)))
                run.warm_up(plan.warmup)
        for turn in range(plan.steps):
            say(f"round {turn + 1} of {plan.steps}")
            first = turn % len(runs)
            for run in [*runs[first:], *runs[:first]]:
                if run.ranks is not None:
                    with run.failing_alone(say):
                        run.timed_step()
        for run in runs:
            if run.ranks is not None:
                with run.failing_alone(say):
                    run.finish()
        yield folder


def _job(result: Result, workload: Workload, plan: Plan, folder: Path) -> Job:
    folder.mkdir()
    return Job(
        result.system,
        result.policy,
        workload,
        plan.ranks,
        plan.fake_world,
        plan.threads,
        str(folder),
        "cold",
        plan.wire,
        plan.deadline_s,
    )


class Run:
    """One contender on its way: its processes while it lives, and the result so far."""

    trainer: type[Trainer] = Trainer

    def __init__(self, result: Result) -> None:
        self.result = result
        self.job: Job | None = None
        self.ranks: Ranks | None = None

    @contextlib.contextmanager
    def failing_alone(self, say: Callable[[str], None]) -> Iterator[None]:
        """Turns a failure of the ranks into the result's error, and ends them."""
        try:
            yield
        except RanksFailed as failure:
            self.result.error = str(failure)
            say(f"{self.result.name}: failed\n{failure}")
            self.close()

    def start(self, job: Job) -> None:
        self.job, self.ranks = job, Ranks(job, self.trainer)
        self.ask("build")

    def start_again(self, start: str, warmup: int, say: Callable[[str], None], empty: Path | None = None) -> None:
        """Once the first start has left: the same processes anew, until they end, on the caches that it filled or with
        those of an empty folder. Nothing of a contender that has failed."""
        if self.result.error is not None:
            return
        assert self.job is not None
        say(f"{self.result.name}: starting again, {start}")
        self.close()
        job = self.job
        with self.failing_alone(say):
            self.start(replace(job, start=start, folder=job.folder if empty is None else str(empty)))
            first = duration([first.step for first in self.ask("first_step")])
            warmup_s = [first, *(duration(self.ask("step")) for _ in range(warmup - 1))]
            (self.result.warm_warmups_s if empty is None else self.result.cold_warmups_s).append(warmup_s)
            self.ask("leave")
        self.close()
        self.job = job

    def warm_up(self, steps: int) -> None:
        firsts: list[FirstStep] = self.ask("first_step")
        self.result.gradient_norm = firsts[0].gradient_norm
        self.result.warmup_s.append(self._took([first.step for first in firsts]))
        self.result.warmup_s += [self._took(self.ask("step")) for _ in range(steps - 1)]
        self.ask("start_measuring_memory")

    def timed_step(self) -> None:
        """One, after another that fills the processor's caches with what is this contender's."""
        self._took(self.ask("step"))
        steps: list[Step] = self.ask("step")
        self.result.steps_s.append(self._took(steps))
        self.result.steps_cpu_s.append(statistics.fmean(step.cpu for step in steps))

    def _took(self, steps: Sequence[Step]) -> float:
        """Keeps the loss of a step that all ranks took, and returns its duration."""
        self.result.losses.append(statistics.fmean(step.loss for step in steps))
        return duration(steps)

    def finish(self) -> None:
        """All that is measured apart from the timed steps."""
        self.result.memory = self.ask("memory")
        self.result.profile = self.ask("profile")[0]
        self.result.planned_bytes = self.ask("planned_bytes")[0]
        self.result.final_loss = statistics.fmean(self.ask("loss"))
        self.ask("leave")

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None

    def ask(self, order: str) -> list[Any]:
        """The answers of all ranks."""
        assert self.ranks is not None
        return self.ranks.ask(order)
