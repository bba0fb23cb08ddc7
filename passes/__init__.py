"""The compiler's table of contents: every graph pass, in the order in which it runs.

Dynamo captures a graph in which each use of a sharded parameter is one call of ``unshard_param``. Then:

=============  ===========  =============================================================================
stage          pass         what it does
=============  ===========  =============================================================================
captured       hoist        moves those calls out of checkpointed regions
captured       bind         parameters → one flat input for each unit, gathered and unpacked at first use
(AOTAutograd)               derives the backward: pack and reduce-scatter, one for each unit
joint          reshard      says which gathers the backward repeats and which results it keeps
(partitioner)  retain       cuts the joint graph into forward and backward; keeps what the memory budget allows
partitioned    expand       each collective → a buffer, a launch and a wait
partitioned    sink         gradients are written where they will be reduced
partitioned    overlap      launches and waits are placed beside computation, within the memory budget
partitioned    leave        the backward's last reductions are waited for by who reads the gradients
partitioned    assign       buffers → slots of static memory, by their lifetimes
partitioned    verify       proves what must hold before anything runs
=============  ===========  =============================================================================

A pass is a function of a graph and a :class:`CompileContext`. What it needs to know of a node it reads from
``node.meta["vescale"]``, written where the node was inserted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from .assign import assign
from .bind import bind
from .census import census
from .context import CompileContext, Pass, Stage, comm_of, shared_text
from .expand import expand
from .hoist import hoist
from .leave import leave
from .memory import left_bytes, peak_of
from .order import ordered_nodes
from .overlap import overlap
from .reshard import reshard
from .retain import retain
from .sink import sink
from .summary import Summary
from .verify import verify

PIPELINE: tuple[Pass, ...] = (
    Pass(Stage.CAPTURED, hoist, provides=frozenset({"markers take graph inputs"})),
    Pass(
        Stage.CAPTURED,
        bind,
        requires=frozenset({"markers take graph inputs"}),
        provides=frozenset({"flat inputs"}),
    ),
    Pass(
        Stage.JOINT,
        reshard,
        requires=frozenset({"flat inputs"}),
        provides=frozenset({"gathers have a policy"}),
    ),
    Pass(
        Stage.PARTITIONED,
        expand,
        requires=frozenset({"flat inputs"}),
        provides=frozenset({"launches and waits"}),
    ),
    Pass(Stage.PARTITIONED, sink, provides=frozenset({"gradients in place"})),
    Pass(
        Stage.PARTITIONED,
        overlap,
        requires=frozenset({"launches and waits", "gradients in place"}),
        provides=frozenset({"a schedule"}),
    ),
    Pass(
        Stage.PARTITIONED,
        leave,
        requires=frozenset({"a schedule"}),
        provides=frozenset({"every wait has its reader"}),
    ),
    Pass(
        Stage.PARTITIONED,
        assign,
        requires=frozenset({"launches and waits", "gradients in place", "every wait has its reader"}),
        provides=frozenset({"slots"}),
    ),
    Pass(Stage.PARTITIONED, verify, requires=frozenset({"launches and waits", "slots"})),
)

__all__ = ["PIPELINE", "check_pipeline", "ordered_nodes", "retain", "run_stage", "summarize"]

Observer = Callable[[str, fx.GraphModule], None]


def run_stage(
    stage: Stage,
    gm: fx.GraphModule,
    context: CompileContext,
    observe: Observer,
    pipeline: Sequence[Pass] = PIPELINE,
) -> None:
    """Runs the passes of one stage on ``gm``, in place.

    ``observe`` is called with the graph before the first and after each of them.
    """
    passes = [each for each in pipeline if each.stage is stage]
    observe(f"before {passes[0].name}", gm)
    for each in passes:
        each.run(gm, context)
        gm.graph.lint()
        observe(f"after {each.name}", gm)
    gm.recompile()


def summarize(graph: fx.Graph, context: CompileContext) -> Summary:
    """What is known of a final graph, after all passes, before it runs."""
    assert context.part is not None
    marks = [(node, comm) for node in graph.nodes if (comm := comm_of(node)) is not None]
    return Summary(
        nodes=len(graph.nodes),
        schedule=tuple(
            f"{comm.role.value} {comm.kind} of {context.units[comm.unit].name}" + shared_text(node)
            for node, comm in marks
        ),
        entries=tuple(census(graph, context)),
        slots=context.slot_uses[context.part],
        peak=peak_of(graph, context),
        left_bytes=left_bytes(graph, context),
        prediction=context.predictions[context.part],
    )


def check_pipeline(pipeline: Sequence[Pass]) -> None:
    """Raises ValueError if a pass requires what no earlier pass provides."""
    known: set[str] = set()
    for each in pipeline:
        if missing := each.requires - known:
            raise ValueError(f"pass {each.name} requires {sorted(missing)}, which no earlier pass provides")
        known |= each.provides


check_pipeline(PIPELINE)
