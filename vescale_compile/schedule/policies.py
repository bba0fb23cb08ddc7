"""Policies of the list scheduler: which of the collectives that could be launched now goes first.

A policy is a key: the smallest goes first. Among collectives that bring something the scheduler always offers the
one with the earliest deadline (Jackson's rule), so what a policy decides is when reductions go in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vescale_compile.schedule.jobs import Job

Slack = Callable[[Job], float]
"""Seconds for which a job could be put off without a stall, if the computation runs on unhindered."""

Policy = Callable[[Job, Slack], tuple[float, ...]]


def gathers_first(job: Job, slack: Slack) -> tuple[float, ...]:
    """The computation waits for gathers, and nobody waits for reductions before the end of the step."""
    return (job.deadline, job.ready)


def reductions_first(job: Job, slack: Slack) -> tuple[float, ...]:
    """A gradient buffer is held until its reduction is done: where memory is short, that is what to end first."""
    return (job.ready == 0, job.deadline, job.ready)


def urgent_gathers_first(job: Job, slack: Slack) -> tuple[float, ...]:
    """A gather with time left lets a reduction pass, so that the wire carries it beside the computation; one that
    would be late if it waited any longer than it takes itself goes first."""
    urgent = job.ready == 0 and slack(job) < job.duration
    return (not urgent, job.ready == 0, job.deadline, job.ready)


def in_order(sequence: Sequence[Job]) -> Policy:
    """The order of ``sequence``, whatever the time."""
    rank = {job.transfers: float(place) for place, job in enumerate(sequence)}
    return lambda job, slack: (rank[job.transfers],)


POLICIES: tuple[Policy, ...] = (gathers_first, urgent_gathers_first, reductions_first)
