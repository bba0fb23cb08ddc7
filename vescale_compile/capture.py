"""From Dynamo's graph and its arguments to what the passes need: which inputs are whose parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from .cost import Cluster
from .hardware import cluster_for
from .options import Options
from .passes.context import ON_SHARDS, CompileContext, GraphError, GraphUnit, Lowering, ParamInput
from .ragged.dtensor import RaggedDTensor
from .runtime.boundary import Binding, binding_of, bound
from .runtime.dbuffer import DBuffer
from .runtime.decisions import Trial, first_decides
from .runtime.groups import stride_of
from .runtime.marker import unshard_param
from .runtime.model import Model, beside, buffers_beside, trained_bytes
from .runtime.ops import gives_float32_products
from .runtime.unshard import ParamView
from .torch_internals.autograd import in_backward, saves_elsewhere
from .torch_internals.tracing import (
    copy_capture_marks,
    ends_in_graph_break,
    graph_module,
    is_shape,
    tracing_fake_mode,
    turns_grad_on,
)

_STATES = 2  # of a parameter, in the optimizers that most models are trained with


@dataclass(frozen=True)
class CapturedUnit:
    """A unit of a captured graph, and the arguments of that graph which are its parameters.

    Attributes:
        graph: what the passes know of it.
        layout: of the buffer at capture; a later call of the graph may bring another, laid out alike.
        positions: of the parameters among the arguments, in the order of ``graph.views``.
        indices: of the same parameters in the buffer.
    """

    graph: GraphUnit
    layout: str
    positions: tuple[int, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Capture:
    """A captured graph of a sharded model.

    Attributes:
        gm: a copy of Dynamo's graph, for the passes to edit: Dynamo reads its own after the backend returned.
        context: what the passes read.
        units: the sharded parameters that the graph reads, by unit, in the order of ``context.units``.
        buffers: the units' buffers; not in the units, so that compiled graphs don't keep a model's memory.
        others: positions of the arguments that are no sharded parameters.
    """

    gm: fx.GraphModule
    context: CompileContext
    units: tuple[CapturedUnit, ...]
    buffers: tuple[DBuffer, ...]
    others: tuple[int, ...]


def buffers_read(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[DBuffer, ...]:
    """Those of the sharded parameters among a graph's arguments, in the order in which the graph reads them."""
    return tuple(_by_buffer(gm, _bindings(gm, example_inputs)))


def _bindings(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, Binding]:
    """By position, of the sharded parameters among the arguments.

    Raises:
        GraphError: another sharded tensor is among them, a gradient, say.
        RuntimeError: so is one in the place of a parameter that a module reads.
    """
    sharded = {i: value for i, value in enumerate(example_inputs) if isinstance(value, RaggedDTensor)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, value in sharded.items():
        users = placeholders[position].users
        if binding_of(value) is None and not any(user.target is unshard_param for user in users):
            raise GraphError(
                f"[rank {dist.get_rank()}] compiled code computes on a sharded tensor, {placeholders[position].name} "
                f"of shape {tuple(value.shape)}, that is no parameter. {ON_SHARDS}"
            )
    return {i: bound(value) for i, value in sharded.items()}


def _by_buffer(gm: fx.GraphModule, bindings: dict[int, Binding]) -> dict[DBuffer, list[int]]:
    """Positions of the arguments that are parameters of each, in the order in which the graph reads them."""
    found: dict[DBuffer, list[int]] = {}
    for position in _by_first_use(gm, bindings):
        found.setdefault(bindings[position].buffer, []).append(position)
    return found


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, trial: Trial | None = None) -> Capture:
    """Reads the sharded parameters among the example inputs, of which there is one at least.

    What the passes decide holds in the ``trial``, if it is for one, and otherwise for all ranks that train.

    Raises:
        ValueError: the cluster of ``options`` can't be read on this rank, or is of another number of ranks.
        GraphError: the budget is a share of memory that is not known, or that optimizer states fill.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() or turns_grad_on(gm)):
        return _capture(gm, example_inputs, options, trial)


def _capture(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, trial: Trial | None) -> Capture:
    """:func:`capture` where gradients are on if the graph records any."""
    bindings = _bindings(gm, example_inputs)
    positions = _by_buffer(gm, bindings)
    units = tuple(
        CapturedUnit(
            _graph_unit(ordinal, name, buffer, [example_inputs[i] for i in members]),
            buffer.layout,
            tuple(members),
            tuple(bindings[i].slot for i in members),
        )
        for ordinal, (name, (buffer, members)) in enumerate(zip(_names(positions), positions.items(), strict=True))
    )
    params = {
        position: ParamInput(ordinal, view, bindings[position].buffer.slots[bindings[position].slot].name)
        for ordinal, unit in enumerate(units)
        for view, position in enumerate(unit.positions)
    }
    shard = next(iter(positions)).shard
    largest = max((buffer.mesh for buffer in positions), key=DeviceMesh.size)
    decide = first_decides(largest) if trial is None else trial.first_decides(largest)
    # Of all graphs of a model: a calibration, which is of so many ranks, will do for each.
    ranks = max(buffer.world_size for buffer in {*positions, *buffers_beside(positions)})
    cluster = cluster_for(options.cluster, shard.device, ranks)
    state_bytes = _STATES * trained_bytes(positions)
    context = CompileContext(
        rank=dist.get_rank(),
        lowering=Lowering(options.lowering),
        cluster=cluster,
        wanted_cluster=repr(options.cluster),
        memory_budget=_budget(options, cluster, state_bytes),
        wanted_budget=options.budget_text,
        state_bytes=state_bytes,
        # Of what is only simulated, the device that it is simulated for says so.
        float32_products=(is_shape(shard) and cluster.device.float32_products) or gives_float32_products(shard.device),
        beside=beside(
            tuple(positions),
            breaks=ends_in_graph_break(gm),
            given=given_bytes(example_inputs),
            checkpointed=saves_elsewhere() or in_backward(),
        ),
        decide=decide,
        units=tuple(unit.graph for unit in units),
        params=params,
    )
    return Capture(
        gm=_copy(gm),
        context=context,
        units=units,
        buffers=tuple(positions),
        others=tuple(i for i in range(len(example_inputs)) if i not in bindings),
    )


def _budget(options: Options, cluster: Cluster, state_bytes: int) -> int | None:
    try:
        return options.budget_on(cluster.device, state_bytes)
    except ValueError as error:
        raise GraphError(f"[rank {dist.get_rank()}] {error}") from None


def given_bytes(args: Sequence[Any]) -> int:
    """Of arguments that have gradients and are no parameters: results of what ran before."""
    given = (value for value in args if isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
    return sum(value.nbytes for value in given if value.requires_grad)


def _by_first_use(gm: fx.GraphModule, bindings: dict[int, Binding]) -> list[int]:
    """Positions of the sharded parameters, in the order in which the graph first reads them."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    never = len(order)

    def first_use(position: int) -> int:
        return min((order[user] for user in placeholders[position].users), default=never)

    return sorted(bindings, key=lambda position: (first_use(position), position))


def _names(buffers: Iterable[DBuffer]) -> list[str]:
    """Of units: where a graph reads two models, both may have one of a name."""
    names: list[str] = []
    models: dict[Model, int] = {}
    for buffer in buffers:
        model = models.setdefault(buffer.model, len(models) + 1)
        names.append(buffer.name if buffer.name not in names else f"{buffer.name} of model {model}")
    return names


def _graph_unit(ordinal: int, name: str, buffer: DBuffer, params: Sequence[Tensor]) -> GraphUnit:
    views = tuple(buffer.view_of(bound(param).slot, trainable=param.requires_grad) for param in params)
    needs_grad = torch.is_grad_enabled() and any(view.trainable for view in views)
    accumulates = needs_grad and buffer.sync.accumulates
    with tracing_fake_mode():
        shard = torch.empty(buffer.shard.shape, dtype=buffer.shard.dtype, device=buffer.shard.device)
        shard.requires_grad_(needs_grad)
        wanted = accumulates or buffer.gradient_packing
        reductions = torch.zeros(1, dtype=torch.int64, device="cpu") if wanted else None
    comm, reshard = buffer.comm(ordinal), buffer.policy.reshard_after_forward
    return GraphUnit(
        name,
        shard,
        views,
        _others(buffer, params),
        comm,
        reshard,
        accumulates,
        reductions,
        block=buffer.block,
        stride=stride_of(buffer.group),
        replica_stride=stride_of(buffer.replicas) if buffer.replicas is not None else 1,
    )


def _others(buffer: DBuffer, read: Sequence[Tensor]) -> tuple[ParamView, ...]:
    """The buffer's parameters that are not among those ``read``: trainable, because no guard says if they are."""
    unread = set(range(len(buffer.slots))) - {bound(param).slot for param in read}
    return tuple(buffer.view_of(index, trainable=True) for index in sorted(unread))


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that can be edited, sub-graphs included; parameters and buffers are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    copied = graph_module(gm, graph)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copy(child))
    copy_capture_marks(gm, copied, copies)
    return copied
