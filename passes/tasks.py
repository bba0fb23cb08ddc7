"""A graph as a task graph: its computation in segments, its collectives as transfers.

The computation keeps its order and is cut at the nodes where a unit's parameters are first or last read and its
gradients first or last written. Each segment has a time, and each collective a time, its readers and its writers, as
the cost model predicts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from ..cost import Cluster, collective_cost, host
from ..cost.collectives import ALL_GATHER, ALL_TO_ALL, averaged_over_replicas
from ..cost.compute import compute_seconds, issue_seconds
from ..runtime import ops
from ..runtime.quantized_ops import start_reduce_scatter_quantized
from ..schedule import Compute, TaskGraph, Transfer
from ..schemas import is_of_python, is_view
from ..torch_internals.inductor_graphs import generates_code_for
from .aliases import bases_of, touches_of
from .assign import lifetimes
from .context import CompileContext, Lowering, Part, Role, Use, buffer_of, comm_of, marked_buffer
from .edit import nbytes_of, order_of
from .moves import CASTS

_FUSED_BLOCKS = 2
_COALESCED = (ops.start_all_gather, ops.start_reduce_scatter)


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        kind, unit: as of its nodes' marks.
        launch, wait: its nodes.
        buffers: what the launch takes that must exist before it.
        touched: computation that reads the gathered parameters, or writes the gradients, in order.
        escapes: whether the gathered parameters are kept for the backward.
        casts: of a reduction's result, right behind its wait.
    """

    kind: str
    unit: int
    launch: fx.Node
    wait: fx.Node
    buffers: tuple[fx.Node, ...]
    touched: tuple[fx.Node, ...]
    escapes: bool
    casts: tuple[fx.Node, ...]

    @property
    def gathers(self) -> bool:
        return self.kind == ALL_GATHER


def collectives_of(graph: fx.Graph) -> list[Collective]:
    """The collectives of a graph, in the order of their launches.

    What the forward carries over counts in the backward, as a gather that is launched and waited for by one node.
    """
    touched = touches_of(graph, bases_of(graph))
    waits = {
        (comm.kind, comm.unit): node
        for node in graph.nodes
        if (comm := comm_of(node)) is not None and comm.role is Role.WAIT
    }
    found = []
    for node in graph.nodes:
        comm = comm_of(node)
        if comm is None or comm.role not in (Role.LAUNCH, Role.TAKE):
            continue
        buffers = [arg for arg in node.all_input_nodes if buffer_of(arg) is not None]
        nodes = [each for each in touched[buffers[0]] if comm_of(each) is None]
        reduced = [user for buffer in buffers[1:] for user in touched[buffer]]
        found.append(
            Collective(
                comm.kind,
                comm.unit,
                node,
                node if comm.role is Role.TAKE else waits[comm.kind, comm.unit],
                tuple(buffers),
                tuple(each for each in nodes if each.op != "output"),
                any(each.op == "output" for each in nodes),
                tuple(user for user in reduced if user.target in CASTS),
            )
        )
    return found


def segments_of(
    graph: fx.Graph, context: CompileContext, collectives: Sequence[Collective], *, fuse: bool = True
) -> list[list[fx.Node]]:
    """The computation, cut before the first and after the last node that touches a collective's buffer, but not within
    what may be one generated kernel, unless it must be: of one that a launch divides there would be two, which read the
    same."""
    firsts = {each.touched[0] for each in collectives if each.touched}
    lasts = {each.touched[-1] for each in collectives if each.touched}
    segments: list[list[fx.Node]] = []
    ended = True
    for kernel in _kernels(graph, context, collectives, fuse):
        if ended or not firsts.isdisjoint(kernel):
            segments.append([])
        segments[-1] += kernel
        ended = not lasts.isdisjoint(kernel)
    return segments


def _kernels(
    graph: fx.Graph, context: CompileContext, collectives: Sequence[Collective], fuse: bool
) -> Iterator[list[fx.Node]]:
    """The computation, with nodes that follow one another together where Inductor may make one kernel of them.

    Those touch collectives of two blocks at most, as what is between one block and the next does: before a model of
    generated code alone, all would else have to be gathered.
    """
    casts = {cast for each in collectives for cast in each.casts}
    blocks: dict[fx.Node, set[str]] = {}
    for each in collectives:
        unit = context.units[each.unit]
        for node in each.touched:
            blocks.setdefault(node, set()).add(unit.block or unit.name)
    kernel: list[fx.Node] = []
    touched: set[str] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not _computes(node) or node in casts:
            continue
        touches = blocks.get(node, set())
        if kernel and not (fuse and _fuse(kernel[-1], node, context) and len(touched | touches) <= _FUSED_BLOCKS):
            yield kernel
            kernel, touched = [], set()
        kernel.append(node)
        touched |= touches
    if kernel:
        yield kernel


def _fuse(node: fx.Node, following: fx.Node, context: CompileContext) -> bool:
    if context.lowering is not Lowering.INDUCTOR:
        return False
    return generates_code_for(node.target) and generates_code_for(following.target)


def _computes(node: fx.Node) -> bool:
    """Sizes, which are there where a rank has compiled for batches of any size, are none of its work."""
    is_communication = comm_of(node) is not None or buffer_of(node) is not None
    return not (is_view(node) or is_of_python(node.target) or is_communication)


def task_graph(
    graph: fx.Graph,
    context: CompileContext,
    collectives: Sequence[Collective],
    segments: Sequence[list[fx.Node]],
    live_bytes: int,
    part: Part,
) -> TaskGraph:
    """The graph's segments and collectives as tasks. The average over replicas is part of a reduction, or what it takes
    afterwards, on links between nodes that carry nothing else. What is gathered and what is reduced lie apart, as slots
    have them.

    Args:
        segments: of the computation.
        live_bytes: what the step takes all the time, apart from the collectives' buffers.
        part: which graph it is.
    """
    seconds, issue = _seconds_of(graph, context)
    held = _unpacked_bytes(graph, collectives, segments)
    compute = [
        Compute(
            segment[0].name,
            sum(seconds[node] for node in segment),
            live_bytes + unpacked,
            sum(issue[node] for node in segment),
        )
        for segment, unpacked in zip(segments, held, strict=True)
    ]
    place = {node: number for number, segment in enumerate(segments) for node in segment}
    groups = [context.cluster.of(unit.comm.world_size, stride=unit.stride) for unit in context.units]
    within = all(group.nodes == 1 for group in groups)
    transfers = [
        _transfer(each, context, groups[each.unit], place, len(segments), within_nodes=within) for each in collectives
    ]
    before, after = _around(context, part)
    return TaskGraph(tuple(compute), tuple(transfers), apart=True, before=before, after=after)


def one_task(graph: fx.Graph, context: CompileContext, part: Part) -> TaskGraph:
    """The computation of a graph that communicates nothing, or does nothing else."""
    duration, issue = (sum(seconds.values()) for seconds in _seconds_of(graph, context))
    before, after = _around(context, part)
    return TaskGraph((Compute("computation", duration, issue=issue),), (), before=before, after=after)


def _around(context: CompileContext, part: Part) -> tuple[float, float]:
    """Seconds that the host takes for parameters before the graph that reads them, and for gradients afterwards."""
    of_host = context.cluster.device.of_host
    if part is Part.BACKWARD:
        return 0.0, of_host(host.PARAMETER_GRADIENT * sum(map(len, context.gradients.values())))
    return of_host(host.PARAMETER_READ * sum(len(unit.views) for unit in context.units)), 0.0


def _seconds_of(graph: fx.Graph, context: CompileContext) -> tuple[dict[fx.Node, float], dict[fx.Node, float]]:
    """What each node is predicted to take of a device of the cluster that is compiled for, and of its host."""
    device, fused = context.cluster.device, context.lowering is Lowering.INDUCTOR
    seconds = compute_seconds(graph.nodes, device, fused=fused)
    return seconds, issue_seconds(seconds, device, fused=fused)


def _unpacked_bytes(graph: fx.Graph, collectives: Sequence[Collective], segments: Sequence[list[fx.Node]]) -> list[int]:
    """In each segment, the memory of parameters that are computed from what was gathered."""
    sent = {buffer for each in collectives for buffer in each.buffers}
    unpacked = [
        each
        for each in lifetimes(graph, bases_of(graph))
        if each.node not in sent and not marked_buffer(each.node).carried
    ]
    order = order_of(graph)
    return [
        sum(
            buffer.nbytes
            for buffer in unpacked
            if buffer.first <= order[segment[-1]] and buffer.last >= order[segment[0]]
        )
        for segment in segments
    ]


def _transfer(
    each: Collective,
    context: CompileContext,
    cluster: Cluster,
    place: dict[fx.Node, int],
    segments: int,
    *,
    within_nodes: bool,
) -> Transfer:
    """One collective among the ranks of ``cluster``; ``within_nodes`` says whether all such ranks share a node."""
    full = nbytes_of(each.buffers[0])
    scratch = sum(nbytes_of(buffer) for buffer in each.buffers[1:] if marked_buffer(buffer).use is Use.SCRATCH)
    exchanges = each.launch.target is start_reduce_scatter_quantized
    # What is exchanged are codes of the gradients, from one half of the scratch to the other.
    sent, kind = (scratch // 2, ALL_TO_ALL) if exchanges else (full, each.kind)
    unit = context.units[each.unit]
    comm = unit.comm
    cost, then = averaged_over_replicas(
        collective_cost(cluster, kind, sent),
        cluster,
        context.cluster.of(1 if each.gathers else comm.replica_count, stride=unit.replica_stride),
        full / comm.world_size,
        beside=within_nodes and not comm.exchanges,  # on a stream of its own, but for CPUs
    )
    touched = tuple(sorted({place[node] for node in each.touched}))
    return Transfer(
        f"{each.kind} of {unit.name}",
        cost.latency,
        cost.wire_time,
        writers=() if each.gathers else touched or (0,),
        readers=(touched or (segments - 1,)) if each.gathers else (),
        input_bytes=0 if each.gathers else full,
        output_bytes=full if each.gathers and not each.escapes else 0,
        scratch_bytes=scratch,
        lane=_lane(each, context),
        load=cost.load,
        stretch=cost.stretch,
        wakeup=cost.wakeup,
        launch=cost.launch,
        issue=cluster.device.of_host(host.UNIT),
        call=cost.call + then.call,
        then_latency=then.latency,
        then_wire_time=then.wire_time,
        merge=_merge(each, context),
        block=unit.block,
    )


def _lane(each: Collective, context: CompileContext) -> str:
    """A communicator of NCCL runs its collectives one after another, on whatever streams, and gathers of all groups are
    launched on one stream, as are reductions on another. A gather of one group and a reduction of another are taken to
    wait for each other too. Messages fly together."""
    return each.kind if context.units[each.unit].comm.exchanges else "nccl"


def _merge(each: Collective, context: CompileContext) -> str | None:
    """What collectives have in common that can be one; None for one that can't share."""
    comm = context.units[each.unit].comm
    if not comm.coalesces or each.launch.target not in _COALESCED:
        return None
    return f"{each.kind} {comm.group} {comm.replicas} {each.buffers[0].meta['val'].dtype}"
