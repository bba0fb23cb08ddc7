"""Static schedules of communication beside computation, within a memory budget.

Pure Python, on plain data: a :class:`TaskGraph` goes in, a :class:`Schedule` comes out, and :func:`simulate` says
what it does. Nothing here knows of PyTorch.
"""

from vescale_compile.schedule.adapt import adapt, touches
from vescale_compile.schedule.bound import Bound, lower_bound
from vescale_compile.schedule.budget import BudgetError, check_budget, least_peak
from vescale_compile.schedule.early import launched_early
from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.machine import ScheduleError
from vescale_compile.schedule.program import Instruction, Launch, Run, Schedule, Wait
from vescale_compile.schedule.search import Scheduled, find_schedule, lean_schedule, synchronous_schedule
from vescale_compile.schedule.simulate import Timeline, TransferSpan, simulate
from vescale_compile.schedule.tasks import Compute, Transfer

__all__ = [
    "Bound",
    "BudgetError",
    "Compute",
    "Instruction",
    "Launch",
    "Run",
    "Schedule",
    "ScheduleError",
    "Scheduled",
    "TaskGraph",
    "Timeline",
    "Transfer",
    "TransferSpan",
    "Wait",
    "adapt",
    "check_budget",
    "find_schedule",
    "launched_early",
    "lean_schedule",
    "least_peak",
    "lower_bound",
    "simulate",
    "synchronous_schedule",
    "touches",
]
