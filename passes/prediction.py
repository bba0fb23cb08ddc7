"""What the cost model says of a final graph: when it computes, when it communicates, and what of that is exposed.

Times are in seconds from the graph's start, on the cluster that the graph was compiled for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..schedule import Bound, TaskGraph, Timeline


@dataclass(frozen=True)
class Span:
    """Something that takes time."""

    what: str
    start: float
    stop: float


@dataclass(frozen=True)
class Phase:
    """A part of a step, which a host launches and a device computes. Seconds.

    Attributes:
        alone: until the device is done, if it and the host are at rest before.
        fed: the same, if the host has launched everything before.
        issued: until the host is done, and goes on to the next part. 0 on a CPU, which is its own host.
    """

    alone: float
    fed: float
    issued: float


@dataclass(frozen=True)
class Prediction:
    """A graph's time: ``seconds = compute + exposed + starved + slowdown``.

    Attributes:
        seconds: until everything is done and waited for, from rest.
        compute: of the computation, with the device to itself.
        communication: of the collectives, each with the wire to itself.
        exposed: in which the computation stands still and waits.
        slowdown: that the computation loses to launches, and to collectives which take a share of the device.
        least: what no schedule of the graph can beat: the largest of its computation, its communication, its critical
            path, and what its host has to do.
        computation: the computation's pieces, in order.
        transfers: the collectives on the wire, in the order of their launches.
        tail: at the end, in which nothing is left to compute or to launch. Of a backward, the optimizer's step may
            begin meanwhile.
        starved: in which the computation stands still until the host has launched what is next, or is done.
        issued: until the host is done, and goes on to what comes after the graph.
        least_fed: the least if the host has launched everything before.
        least_issued: the least of ``issued``.
    """

    seconds: float
    compute: float
    communication: float = 0.0
    exposed: float = 0.0
    slowdown: float = 0.0
    least: float = 0.0
    computation: tuple[Span, ...] = ()
    transfers: tuple[Span, ...] = ()
    tail: float = 0.0
    starved: float = 0.0
    issued: float = 0.0
    least_fed: float = 0.0
    least_issued: float = 0.0

    @property
    def phase(self) -> Phase:
        """The graph as a part of a step."""
        return Phase(self.seconds, self.seconds - self.starved, self.issued)


def predict(tasks: TaskGraph, timeline: Timeline, bound: Bound, fed: Bound) -> Prediction:
    """What the graph will do by the timeline of its tasks, beside what no schedule of them can beat, and what none
    could if the host had done everything before."""
    return Prediction(
        seconds=timeline.makespan,
        compute=timeline.compute,
        communication=timeline.communication,
        exposed=timeline.exposed,
        starved=timeline.starved,
        slowdown=timeline.slowdown,
        least=bound.makespan,
        computation=tuple(
            Span(task.name, start, stop) for task, (start, stop) in zip(tasks.compute, timeline.runs, strict=True)
        ),
        transfers=tuple(
            Span(" + ".join(tasks.transfers[index].name for index in span.transfers), span.start, span.stop)
            for span in timeline.transfers
        ),
        tail=timeline.tail,
        issued=timeline.issued,
        least_fed=fed.makespan,
        least_issued=bound.host,
    )


def seconds_one_after_another(phases: Iterable[Phase]) -> float:
    """Until host and device have come through all phases, both at rest before. The host is ahead where a device takes
    longer: what it launches then is there before the device comes to it."""
    host = device = 0.0
    for phase in phases:
        device = max(device + phase.fed, host + phase.alone)
        host += phase.issued
    return max(host, device)
