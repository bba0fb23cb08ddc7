"""What the cost model says of a final graph: when it computes, when it communicates, and what of that is exposed.

Times are in seconds from the graph's start, on the cluster that the graph was compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Bound, TaskGraph, Timeline


@dataclass(frozen=True)
class Span:
    """Something that takes time."""

    what: str
    start: float
    stop: float


@dataclass(frozen=True)
class Prediction:
    """A graph's time: ``seconds = compute + exposed + starved + slowdown``.

    Attributes:
        seconds: until everything is done and waited for.
        compute: of the computation, with the device to itself.
        communication: of the collectives, each with the wire to itself.
        exposed: in which the computation stands still and waits.
        slowdown: that the computation loses to launches, and to collectives which take a share of the device.
        least: what no schedule of the graph can beat: the largest of its computation, its communication and its
            critical path.
        computation: the computation's pieces, in order.
        transfers: the collectives on the wire, in the order of their launches.
        tail: at the end, in which nothing is left to compute or to launch. Of a backward, the optimizer's step may
            begin meanwhile.
        starved: in which the computation stands still until the host has launched what is next.
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


def predict(tasks: TaskGraph, timeline: Timeline, bound: Bound) -> Prediction:
    """What the graph will do by the timeline of its tasks, beside what no schedule of them can beat."""
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
    )


def predict_alone(compute: float, issue: float) -> Prediction:
    """A graph that has nothing to communicate, whose computation takes so long, and the host so long to launch it."""
    seconds = max(compute, issue)
    return Prediction(
        seconds, compute, starved=seconds - compute, least=seconds, computation=(Span("computation", 0.0, seconds),)
    )
