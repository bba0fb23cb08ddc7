"""The compiler's table of contents: every graph pass, in the order in which it runs.

Dynamo captures a graph in which each use of a sharded parameter is one call of ``unshard_param``. Then:

=============  ===========  =============================================================================
stage          pass         what it does
=============  ===========  =============================================================================
captured       hoist        moves those calls out of checkpointed regions
captured       bind         parameters → one flat input for each unit, gathered and unpacked at first use
(AOTAutograd)               derives the backward: pack and reduce-scatter, one for each unit
joint          reshard      says which gathers the backward repeats and which results it keeps
(partitioner)               cuts the joint graph into forward and backward
               retain       parameters that memory allows are handed over, not gathered again
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

from collections.abc import Callable, Mapping

from torch import fx

from .aliases import bases_of
from .assign import assign
from .bind import bind
from .census import census
from .context import CompileContext, Stage, comm_of, shared_text
from .expand import expand
from .hoist import hoist
from .leave import leave
from .memory import GraphMemory, left_bytes
from .order import ordered_nodes
from .overlap import overlap
from .reshard import reshard
from .retain import retain
from .sink import sink
from .slot_memory import sharing_memory
from .summary import Summary
from .verify import verify

Pass = Callable[[fx.GraphModule, CompileContext], None]
PIPELINE: Mapping[Stage, tuple[Pass, ...]] = {
    Stage.CAPTURED: (hoist, bind),
    Stage.JOINT: (reshard,),
    Stage.PARTITIONED: (expand, sink, overlap, leave, assign, verify),
}

__all__ = ["PIPELINE", "bases_of", "ordered_nodes", "retain", "run_stage", "sharing_memory", "summarize"]

Observer = Callable[[str, fx.GraphModule], None]


def run_stage(stage: Stage, gm: fx.GraphModule, context: CompileContext, observe: Observer) -> None:
    """Runs the passes of one stage on ``gm``, in place.

    ``observe`` is called with the graph before the first and after each of them.
    """
    passes = PIPELINE[stage]
    observe(f"before {passes[0].__name__}", gm)
    for run in passes:
        run(gm, context)
        gm.graph.lint()
        observe(f"after {run.__name__}", gm)
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
        peak=GraphMemory(graph, context, context.part).peak(),
        left_bytes=left_bytes(graph, context),
        prediction=context.predictions[context.part],
    )
