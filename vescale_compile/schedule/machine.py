"""The machine that schedules are made for: it runs instructions one by one, and knows time and memory.

It is the one model of execution: the list scheduler asks it what is going on, and the simulator's report is its
record. Times are in seconds, memory in bytes.

- A compute task runs when everything before it in the program is done, and all transfers it reads are.
- A lane runs its collectives one after another, in launch order; one starts no sooner than its launch, that is
  after the computation that precedes it in the program (as a stream waits for the event recorded at a launch).
- There is one wire. Lanes that are busy at the same time share it equally. What goes over other links after it goes
  there one after another, and slows nothing.
- A launch takes time in which nothing is computed, and what is in flight, the collective itself too, goes on.
- The host issues the program, kernel by kernel, and waits for nothing: it may be ahead of the device. Nothing begins
  before it has been issued, and no compute task is over before all of it has.
- A collective that is launched while nothing goes over the wire takes longer, by its wakeup.
- A transfer that loads the compute device slows the computation that runs beside it, and may be slowed by it.
- Memory follows the program, not the clock, so it does not depend on the durations being right: a buffer lives
  from the instruction that needs it to the one after which nothing does.
"""

from __future__ import annotations

from vescale_compile.schedule.graph import TaskGraph
from vescale_compile.schedule.lifetimes import Lifetimes
from vescale_compile.schedule.program import Instruction, Launch, Run, Wait
from vescale_compile.schedule.tasks import Together


class ScheduleError(ValueError):
    """A program that breaks the rules of its graph."""


class Collective:
    """One or more transfers that were launched together, in flight or done.

    Attributes:
        remaining: seconds of the wire.
        then: seconds of other links, after it.
        stopped: seconds at which it is over, known once the wire is done with it.
    """

    __slots__ = ("lane", "load", "remaining", "started", "stopped", "stretch", "then", "transfers")

    def __init__(self, transfers: tuple[int, ...], together: Together) -> None:
        self.transfers = transfers
        self.lane = together.lane
        self.load = together.load
        self.stretch = together.stretch
        self.remaining = together.duration
        self.then = together.then
        self.started: float | None = None
        self.stopped: float | None = None


class Machine:
    """The state after some instructions of a program of ``lifetimes.graph``.

    Attributes:
        now: seconds.
        position: of the next compute task.
        held: bytes of transfers' buffers, by memory.
        most: of each memory the most bytes so far, base memory included.
        outstanding: collectives launched and not waited for, in launch order.
        runs: start and stop of each compute task so far, seconds.
        busy_until: seconds at which the last computation or launch ended.
        exposed: seconds for which the computation has stood still in waits.
        issued: seconds at which the host has issued all instructions so far.
        starved: seconds for which the device has stood still until the host had issued what is next.
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        self.lifetimes, self.graph = lifetimes, lifetimes.graph
        self.now = self.issued = self.starved = self.graph.before
        self.position = 0
        self.held = [0, 0]
        self.most = [0, 0]
        self.instructions: list[Instruction] = []
        self.launched: set[int] = set()
        self.done: set[int] = set()
        self.outstanding: dict[tuple[int, ...], Collective] = {}
        self.collectives: list[Collective] = []
        self.runs: list[tuple[float, float]] = []
        self.busy_until = 0.0
        self.exposed = 0.0
        self._lanes: dict[str, list[Collective]] = {}
        self._free = 0.0  # seconds from which on nothing goes over other links
        self._sent = int(self.graph.apart)  # the memory in which inputs lie

    @property
    def peak(self) -> int:
        """Bytes that the program takes so far, base memory included."""
        return sum(self.most)

    @property
    def makespan(self) -> float:
        """Seconds until device and host are done, if nothing more is to come."""
        return max(self.now, self.issued + self.graph.after)

    def execute(self, instruction: Instruction) -> None:
        """Runs one instruction.

        Raises:
            ScheduleError: it may not come here.
        """
        match instruction:
            case Run(position):
                self.run(position)
            case Launch(transfers):
                self.launch(transfers)
            case Wait(transfers):
                self.wait(transfers)

    def launch(self, transfers: tuple[int, ...]) -> None:
        """Starts a collective, or queues it behind those of its lane."""
        self._check_launch(transfers)
        together = self.graph.together(transfers)
        self._issue(together.issue)
        self.instructions.append(Launch(transfers))
        self.launched.update(transfers)
        collective = Collective(transfers, together)
        self.outstanding[transfers] = collective
        self.collectives.append(collective)
        if not any(self._lanes.values()):
            collective.remaining += together.wakeup
        queue = self._lanes.setdefault(collective.lane, [])
        queue.append(collective)
        if len(queue) == 1:
            collective.started = self.now
        self._hold(together.output_bytes, together.scratch_bytes)
        self._note(self.graph.between[self.position])
        self._spend(together.launch, computing=False)
        self.busy_until = self.now

    def wait(self, transfers: tuple[int, ...]) -> None:
        """Waits for a collective, and gives its input and its scratch back."""
        collective = self.outstanding.pop(transfers, None)
        if collective is None:
            raise ScheduleError(f"{_name(self.graph, transfers)}: waited for, but not in flight")
        self.instructions.append(Wait(transfers))
        before = self.now
        while collective.stopped is None:
            self._advance(None, computing=False)
        self._spend(collective.stopped - self.now, computing=False)
        self.exposed += self.now - before
        self.done.update(transfers)
        together = self.graph.together(transfers)
        self._hold(0, -(together.input_bytes + together.scratch_bytes))

    def run(self, position: int) -> None:
        """Runs a compute task to its end."""
        if position != self.position or position >= len(self.graph.compute):
            raise ScheduleError(f"compute tasks run in order: task {self.position} is next, not {position}")
        for index in self.lifetimes.needs[position]:
            if index not in self.done:
                name = self.graph.transfers[index].name
                raise ScheduleError(f"{self.graph.compute[position].name!r} reads {name!r} before its wait")
        self.instructions.append(Run(position))
        compute = self.graph.compute[position]
        self._hold(0, self.lifetimes.inputs_at[position])
        self._note(compute.live_bytes)
        start = self.now
        self._spend(compute.duration, computing=True)
        self._issue(compute.issue)
        self.busy_until = self.now
        self.runs.append((start, self.now))
        self._hold(-self.lifetimes.outputs_after[position], 0)
        self.position += 1

    def _hold(self, received: int, sent: int) -> None:
        """Takes so many bytes more."""
        self.held[0] += received
        self.held[self._sent] += sent

    def _note(self, live: int) -> None:
        """Notes what is held beside ``live`` bytes of base memory."""
        (first, second), most = self.held, self.most
        if first + live > most[0]:
            most[0] = first + live
        if second > most[1]:
            most[1] = second

    def _issue(self, seconds: float) -> None:
        """Has the host issue for so long, and the device stand still until that is done."""
        self.issued += seconds
        if self.issued > self.now:
            before = self.now
            self._spend(self.issued - self.now, computing=False)
            self.starved += self.now - before

    def _spend(self, seconds: float, computing: bool) -> None:
        """Does what takes so long where nothing is in flight."""
        while seconds > 0:
            seconds = self._advance(seconds, computing)

    def is_over(self, transfers: tuple[int, ...]) -> bool:
        """Whether a collective in flight is over, so that a wait for it takes no time."""
        stopped = self.outstanding[transfers].stopped
        return stopped is not None and stopped <= self.now

    def backlog(self, through: int | None = None) -> float:
        """Seconds that the wire has still to carry: all, or what lies before the end of the transfer ``through``."""
        total, alone, lanes = 0.0, 0.0, []
        for queue in self._lanes.values():
            carried = 0.0
            for item in queue:
                carried += item.remaining
                if through in item.transfers:
                    alone = carried
            lanes.append(carried)
            total += carried
        return total if through is None else sum(min(carried, alone) for carried in lanes)

    def _check_launch(self, transfers: tuple[int, ...]) -> None:
        if not transfers:
            raise ScheduleError("a collective of no transfers was launched")
        parts = [self.graph.transfers[index] for index in transfers]
        if len(parts) > 1 and (parts[0].merge is None or len({(part.merge, part.lane) for part in parts}) > 1):
            raise ScheduleError(f"{_name(self.graph, transfers)}: these may not share a collective")
        for index in transfers:
            if index in self.launched or index in self.lifetimes.kept:
                name = _name(self.graph, transfers)
                raise ScheduleError(f"{name}: launched twice, or although the output of another is kept for it")
        if self.graph.together(transfers).ready > self.position:
            writer = self.graph.compute[self.graph.together(transfers).ready - 1].name
            raise ScheduleError(f"{_name(self.graph, transfers)}: launched before {writer!r} has written")

    def _advance(self, work: float | None, computing: bool) -> float:
        """Lets time pass until a collective stops or, if it is sooner, ``work`` seconds of computation, or of a launch,
        are done. Only computation and collectives slow each other.

        Returns:
            Seconds of work that are left.
        """
        heads = [queue[0] for queue in self._lanes.values() if queue]
        if work is not None and not heads:
            self.now += work
            return 0.0
        slower = [len(heads) * (head.stretch if computing else 1.0) for head in heads]
        times = [head.remaining * factor for head, factor in zip(heads, slower, strict=True)]
        step = min(times)
        speed = 1.0
        if computing:
            speed -= sum(head.load / len(heads) for head in heads)
        if work is not None:
            if work <= step * speed:
                step, work = work / speed, 0.0
            else:
                work -= step * speed
        self.now += step
        for head, time, factor in zip(heads, times, slower, strict=True):
            if time <= step:
                self._stop(head)
            else:
                head.remaining -= step / factor
        return work or 0.0

    def _stop(self, head: Collective) -> None:
        head.remaining, head.stopped = 0.0, self.now
        if head.then:
            head.stopped = self._free = max(self.now, self._free) + head.then
        queue = self._lanes[head.lane]
        queue.pop(0)
        if queue:
            queue[0].started = self.now


def _name(graph: TaskGraph, transfers: tuple[int, ...]) -> str:
    return " + ".join(graph.transfers[index].name for index in transfers)
