"""The backend: ``torch.compile(model, backend="vescale")``.

Dynamo hands over a graph in which every use of a sharded parameter is one call of ``unshard_param``. The
compilation is a straight line: capture → passes on the captured graph → AOTAutograd, with passes on the joint
graph, the partitioner, and passes on its two halves → lowering → agreement of all ranks. What comes out is a
function of flat shards; :class:`CompiledGraph` calls it with the shards of the parameters it is given. Where
AOTAutograd's cache has what another process compiled, only capture and agreement are left (``warm_start.py``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

from .capture import Capture, buffers_read, capture
from .compiled import CompiledGraph, check_agreement, others_hear_of_failures
from .dump import GraphDump
from .frames import roomy
from .options import Options, read_options
from .passes import bases_of, ordered_nodes, retain, run_stage, sharing_memory, summarize
from .passes.context import CompileContext, GraphError, Lowering, Part, Stage
from .report import GraphReport
from .runtime.agreement import DEADLINE_S, RanksDisagree, RanksMissing, agree_on_buffers, tell_of_failure
from .runtime.decisions import Trial
from .runtime.pool import SlotSpec, StepSlots, with_fresh_slots
from .runtime.registered import registering_group
from .sharded_class import anything_sharded
from .shared_lowering import lowered_once
from .torch_internals.aot import Cut, Halves, WrappedPartitioner, aot_compile, run_boxed
from .torch_internals.inductor import (
    cudagraph_options,
    examined_cpu,
    inductor_compile,
    inductor_compile_inner,
    kernels_compiled_beside,
    passes_left_out,
)
from .torch_internals.inductor_graphs import (
    begin_at_operands,
    forget_mutation_regions,
    remove_what_does_nothing,
    remove_whole_views,
    store_as_computed,
)
from .torch_internals.inductor_order import order_kept
from .torch_internals.inductor_reads import CheckedReads, reads_known_by_their_writes
from .torch_internals.tracing import allow_what_depends_on_values
from .unaveraged import warn_of_unaveraged
from .undivided import warn_of_one_unit
from .warm_start import WarmStart, cacheable_functions, identify, mark_version

_log = logging.getLogger(__name__)

# Ranks that find what they compile in a cache wait for those that don't: as after a host has been replaced.
_MOST_TIMES_AS_LONG = 3.0


@roomy
def vescale(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    on_compiled: Callable[[GraphReport], None] | None = None,
    on_graph: Callable[[fx.Graph], None] | None = None,
    generate_code: bool = True,
    trial: Trial | None = None,
) -> Callable[..., Any]:
    """Compiles one graph that Dynamo captured.

    Args:
        gm: Dynamo's graph.
        example_inputs: its arguments: tensors, sharded parameters, symbolic integers.
        options: see :class:`vescale_compile.options.Options`.
        mode: must be None.
        on_compiled: called with what is known of the compiled graph, before it first runs.
        on_graph: called with each final graph, after all passes and before it is lowered.
        generate_code: False ends before Inductor would write kernels, and runs the graphs that it would have got
            operator by operator, on memory of their own: for who only wants to see them, and for tensors that only
            have shapes.
        trial: that the compilation is for, if nothing that is decided in it may hold for those that train.

    Raises (through ``torch.compile`` it is the ``inner_exception`` of a ``torch._dynamo.exc.BackendCompilerFailed``):
        ValueError: an option that does not exist, or has an impossible value.
        GraphError: a graph that can't be compiled, or that breaks an invariant.
        RanksDisagree, RanksMissing: the ranks are not about to do the same collectives.
        RuntimeError: ``registered_memory`` was asked for where the process group has none.
    """
    buffers = buffers_read(gm, example_inputs)
    try:
        read = _read(options, mode)
    except Exception as error:
        if buffers:  # other ranks may wait in both places, if their options are right
            with contextlib.suppress(RanksDisagree, RanksMissing):
                agree_on_buffers(buffers, deadline_s=DEADLINE_S)
                tell_of_failure(buffers, error)
        raise
    if not buffers:
        return _compile_unsharded(gm, example_inputs, read, generate_code)
    agree_on_buffers(buffers, deadline_s=read.deadline)
    if max(buffer.mesh.size() for buffer in buffers) > 1:
        warn_of_unaveraged(gm, example_inputs)
        warn_of_one_unit(buffers)
    with others_hear_of_failures(buffers):
        allow_what_depends_on_values()
        captured = capture(gm, example_inputs, read, trial)
        run = _lowered(captured, example_inputs, read, on_graph, generate_code)
        report = GraphReport.of(captured)
    patience = max(read.deadline, _MOST_TIMES_AS_LONG * captured.context.seconds)
    check_agreement(captured, patience)
    if on_compiled is not None:
        on_compiled(report)
    budget = captured.context.memory_budget
    spare = None if budget is None else budget - report.planned_bytes
    return CompiledGraph(captured, run, read.deadline, patience, spare).call


def _read(options: Mapping[str, Any] | None, mode: str | None) -> Options:
    if mode is not None:
        raise ValueError(
            f"backend='vescale' has no mode {mode!r}: leave it out, and see options=. What it would set for Inductor "
            "can be set in torch._inductor.config"
        )
    if torch._inductor.config.freezing and not torch.is_grad_enabled() and anything_sharded():
        raise ValueError(
            "backend='vescale' can't freeze parameters, of which a rank has a shard only: leave out "
            "torch._inductor.config.freezing"
        )
    return read_options(options)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raises itself what Dynamo would wrap: wrong options, GraphError, ranks that differ."""
    try:
        yield
    except BackendCompilerFailed as error:
        ours = isinstance(error.inner_exception, ValueError | GraphError | RanksDisagree | RanksMissing)
        raise (error.inner_exception if ours else error) from None


def _lowered(
    captured: Capture,
    example_inputs: Sequence[Any],
    options: Options,
    on_graph: Callable[[fx.Graph], None] | None,
    generate_code: bool,
) -> Callable[..., Any]:
    """Runs the passes, and what makes the final graphs callable."""
    registered = registering_group(captured.buffers) if options.registered_memory else None
    dump = GraphDump(captured.context.rank, on_graph)
    run_stage(
        Stage.CAPTURED,
        captured.gm,
        captured.context,
        functools.partial(dump.write, stage=Stage.CAPTURED.value),
    )
    flat = [example for unit in captured.context.units for _, example in unit.inputs if example is not None]
    inputs = [*flat, *(example_inputs[i] for i in captured.others)]
    add_slots = StepSlots(registered, turns=captured.context.turns).add if generate_code else with_fresh_slots
    if captured.context.lowering is Lowering.INDUCTOR:
        return _lower_inductor(captured, inputs, dump, add_slots, generate_code, options.deadline)
    return _lower_eager(captured, inputs, dump, add_slots)


def _lower_inductor(
    captured: Capture,
    inputs: Sequence[Any],
    dump: GraphDump,
    add_slots: Callable[..., Any],
    generate_code: bool,
    deadline: float,
) -> Callable[..., Any]:
    context = captured.context  # not the capture: what is compiled must not keep the model's buffers
    on_cpu = generate_code and any(unit.shard.device.type == "cpu" for unit in context.units)
    for option in cudagraph_options():
        _warn_of_cudagraphs(option)
    warm_start = WarmStart(context, add_slots, examined_cpu() if on_cpu else None)
    cached = generate_code and not dump.active
    if cached:
        identify(captured.gm, context, inputs)

    def compile_part(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        part = Part.INFERENCE if kwargs.get("is_inference") else Part.FORWARD
        part = Part.BACKWARD if kwargs.get("is_backward") else part
        remove_what_does_nothing(gm, inputs)
        slots = _run_partitioned(gm, context, part, dump)
        if not generate_code:
            return add_slots(run_boxed(gm), slots)
        forget_mutation_regions(gm.graph)
        remove_whole_views(gm)
        bases = bases_of(gm.graph)
        begin_at_operands(gm.graph, bases)
        store_as_computed(gm.graph, bases)
        version = mark_version(gm, slots)
        added = gm.graph.find_nodes(op="placeholder")[len(inputs) :]
        examples = [*inputs, *(node.meta["val"] for node in added)]
        with lowered_once(gm, examples, version, deadline) as waited:
            warm_start.waited += waited
            return warm_start.keep(functools.partial(inductor_compile_inner, gm, examples, **kwargs), part)

    beside = kernels_compiled_beside() if on_cpu else contextlib.nullcontext()
    with beside, order_kept(ordered_nodes), reads_known_by_their_writes(), warm_start.compiling():
        return inductor_compile(
            captured.gm,
            inputs,
            inner_compile=compile_part,
            cached=cached,
            config_patches={
                "custom_partitioner_fn": _partitioner(captured.context, dump),
                "_post_fusion_custom_pass": CheckedReads(sharing_memory),
                **passes_left_out(),
                "unsafe_marked_cacheable_functions": cacheable_functions(),
            },
        )


def _lower_eager(
    captured: Capture, inputs: Sequence[Any], dump: GraphDump, add_slots: Callable[..., Any]
) -> Callable[..., Any]:
    context = captured.context

    def finish(gm: fx.GraphModule, inputs: Sequence[Any], *, part: Part) -> Callable[..., Any]:
        slots = _run_partitioned(gm, context, part, dump)
        return add_slots(run_boxed(gm), slots)

    return aot_compile(
        captured.gm,
        inputs,
        forward=functools.partial(finish, part=Part.FORWARD),
        backward=functools.partial(finish, part=Part.BACKWARD),
        inference=functools.partial(finish, part=Part.INFERENCE),
        partition=_partitioner(captured.context, dump),
    )


def _partitioner(context: CompileContext, dump: GraphDump) -> WrappedPartitioner:
    def split(gm: fx.GraphModule, results: int, cut: Cut) -> Halves:
        context.results = results
        run_stage(Stage.JOINT, gm, context, functools.partial(dump.write, stage=Stage.JOINT.value))
        halves = cut(gm)
        retain(halves, context)
        return halves

    policies = [unit.reshard_after_forward for unit in context.units]
    return WrappedPartitioner(split, identity=repr((policies, context.memory_budget)))


def _run_partitioned(gm: fx.GraphModule, context: CompileContext, part: Part, dump: GraphDump) -> tuple[SlotSpec, ...]:
    """Runs the passes on one of the final graphs; returns what it wants as inputs besides its own."""
    context.part = part
    run_stage(Stage.PARTITIONED, gm, context, functools.partial(dump.write, stage=part.value))
    context.summaries[part] = summarize(gm.graph, context)
    dump.show_final(gm.graph)
    return context.slots[part]


def _compile_unsharded(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, generate_code: bool
) -> Callable[..., Any]:
    """A graph that reads no sharded parameter: a part of a sharded model, or a model that never was."""
    if not anything_sharded():
        _warn_unsharded()
    elif dist.is_initialized() and dist.get_world_size() > 1:
        warn_of_unaveraged(gm, inputs)
    if options.lowering == "inductor" and generate_code:
        return inductor_compile(gm, inputs, cached=True)
    return aot_compile(gm, inputs, forward=_run_as_is, backward=_run_as_is, inference=_run_as_is)


def _run_as_is(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return run_boxed(gm)


@functools.cache
def _warn_of_cudagraphs(option: str) -> None:
    _log.warning(
        "backend='vescale': torch._inductor.config.%s is on, and has no effect on graphs that gather or reduce: their "
        "shards would be copied to where the CUDA graph was recorded.",
        option,
    )


@functools.cache
def _warn_unsharded() -> None:
    _log.warning(
        "backend='vescale': nothing is sharded by vescale_compile, so the model is compiled as it is, and this backend "
        "averages no gradients over ranks. Call vescale_compile.fully_shard(model) before torch.compile to shard it."
    )
