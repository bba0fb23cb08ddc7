"""What the compiler and the runtime need of PyTorch's private parts, in one place. Tried on torch 2.11.0 to 2.13.0.

``ragged/dtensor.py`` names those that a subclass of DTensor needs, ``inductor_order.py`` and ``inductor_reads.py``
those that keep an order, ``warm_start.py`` those of AOTAutograd's cache. Each entry says why no public name does. When
a PyTorch release breaks something, it breaks here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._inductor import compile_fx as _compile_fx
from torch._inductor import ir as _ir
from torch._inductor import lowering as _lowering
from torch._inductor.async_compile import AsyncCompile as _AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as _PythonWrapper
from torch._inductor.cpu_vec_isa import pick_vec_isa as _pick_vec_isa
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.fx_passes import post_grad as _post_grad
from torch._inductor.fx_utils import get_fake_args_kwargs as _get_fake_args_kwargs
from torch._inductor.runtime.cache_dir_utils import cache_dir as _cache_dir
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch._ops import OpOverload
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as _is_fake
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes

CompiledGraph = Callable[..., Any]


def default_store() -> Store:
    """The store that ``init_process_group`` set up. Public calls only take a store, none gives it back."""
    return dist.distributed_c10d._get_default_store()


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name, which is how graphs hold one."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# Renamed in PyTorch 2.13, where the older names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_coalesced(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup, *, async_op: bool
) -> Any:
    """Several all-gathers as one collective: its work, or, on a GPU's current stream, None. In public only a context
    manager coalesces, and that wants them issued inside it."""
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = async_op
    return group.allgather_into_tensor_coalesced(outputs, inputs, options)


def reduce_scatter_coalesced(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    op: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
    *,
    async_op: bool,
) -> Any:
    """Several reduce-scatters as one collective: its work, or, on a GPU's current stream, None."""
    options = torch._C._distributed_c10d.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = async_op
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options)


def all_reduce_coalesced(tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Several all-reduces in place, as one collective; on a GPU, on the current stream."""
    options = torch._C._distributed_c10d.AllreduceCoalescedOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = False
    if (work := group.allreduce_coalesced(tensors, options)) is not None:
        work.wait()


def debugged_groups_coalesce() -> bool:
    """Whether process groups can do the three above. Under ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` those of PyTorch 2.11 are
    wrapped in one that can't."""
    detail = dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    return torch.__version__ >= "2.12" or dist.get_debug_level() != detail  # type: ignore[attr-defined]


def tracing_fake_mode() -> FakeTensorMode:
    """The fake tensor mode of the compilation in progress; new graph inputs must belong to it."""
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None
    return mode


def shapes_only() -> AbstractContextManager[Any]:
    """Inside it new tensors have shapes and no memory, and operators on them compute shapes; on any device."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_shape(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory, as those made inside :func:`shapes_only`."""
    return isinstance(tensor, FakeTensor)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake tensor mode that the example values of a graph's nodes belong to."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


# Renamed in PyTorch 2.13, where the older name warns.
_hint_of = next(
    getattr(symbolic_shapes, name) for name in ("optimization_hint", "size_hint") if hasattr(symbolic_shapes, name)
)


def size_hint(size: int | torch.SymInt) -> int:
    """A size as it was when the graph was captured, with no guard added; 0 for one that only the data decides."""
    return size if isinstance(size, int) else int(_hint_of(size, fallback=0))


def mark_graph_input(placeholder: fx.Node, name: str) -> None:
    """AOTAutograd demands a Dynamo source of every placeholder, a different one for each."""
    placeholder._dynamo_source = ConstantSource(source_name=name)


def source_name(placeholder: fx.Node) -> str:
    """The expression by which Dynamo's guards read an input of its graph: ``L['self']._parameters['weight']``, say."""
    return str(placeholder._dynamo_source.name)  # type: ignore[attr-defined]


def graph_module(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph whose nodes name modules of ``root``. Within a compilation it writes no code before it is
    called, which most graphs never are: writing and compiling it takes longer than most passes."""
    return fx._lazy_graph_module._make_graph_module(root, graph)


def copy_capture_marks(source: fx.GraphModule, target: fx.GraphModule, nodes: dict[fx.Node, fx.Node]) -> None:
    """Copies what tells AOTAutograd that a graph came from Dynamo, which ``Graph.graph_copy`` leaves behind.

    ``nodes`` maps the nodes of ``source`` to those of ``target``.
    """
    target.meta.update(source.meta)
    if hasattr(source, "_param_name_to_source"):
        target._param_name_to_source = source._param_name_to_source
    for old, new in nodes.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source


@functools.cache
def examined_cpu() -> threading.Thread:
    """Finds out, beside its caller, which vector instructions there are to generate: join it before code is generated.

    Inductor asks when it first generates code for a CPU, and compiles and runs one small program after another: seconds
    in which nothing else would happen.
    """
    examination = threading.Thread(target=_pick_vec_isa, daemon=True)  # who asks again gets the answer, or the error
    examination.start()
    return examination


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether Dynamo has more of the frame to capture after this graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def saves_elsewhere() -> bool:
    """Whether what autograd saves now goes through hooks, as activation checkpointing's, which drop it."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def inductor_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any] | None = None,
    config_patches: dict[str, Any] | None = None,
    *,
    cached: bool,
) -> CompiledGraph:
    """Inductor on a Dynamo graph. ``inner_compile`` sees each partitioned graph before Inductor lowers it.

    ``cached`` lets AOTAutograd's cache, where the user has it on, stand in front of all this.
    """
    with _eager_backward_lowering(), nullcontext() if cached else _without_autograd_cache():
        return _compile_fx.compile_fx(  # type: ignore[return-value]
            gm,
            example_inputs,
            inner_compile=inner_compile or _compile_fx.compile_fx_inner,
            config_patches=config_patches,
        )


def inductor_compile_inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """What ``inner_compile`` stands in front of."""
    return _compile_fx.compile_fx_inner(gm, example_inputs, **kwargs)


@contextmanager
def kernels_compiled_beside() -> Iterator[None]:
    """Has C++ kernels compiled from when each is generated, beside the rest of this graph and all of the next.

    Otherwise they are compiled when the whole graph has been generated, by processes of the C++ compiler that nothing
    runs beside: generated code begins with its kernels, and waits for them before it can be called. Here it doesn't, so
    it must not be called before the end of this context, where what the compiler fails on is raised.
    """
    postponed: list[tuple[_AsyncCompile, dict[str, Any]]] = []
    define = _PythonWrapper.define_kernel

    def define_and_begin(wrapper: _PythonWrapper, name: str, code: str, *args: Any, **kwargs: Any) -> None:
        if code.startswith("async_compile.cpp_pybinding("):  # an expression of the generated code, which finds it begun
            eval(code, {"async_compile": _AsyncCompile()})
        define(wrapper, name, code, *args, **kwargs)

    def postpone(compiler: _AsyncCompile, scope: dict[str, Any]) -> None:
        postponed.append((compiler, scope))

    with (
        mock.patch.object(_PythonWrapper, "define_kernel", define_and_begin),
        mock.patch.object(_AsyncCompile, "wait", postpone),
    ):
        yield
    for compiler, scope in postponed:
        compiler.wait(scope)


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = min_cut_rematerialization_partition,
) -> CompiledGraph:
    """AOTAutograd with our compilers. The public ``aot_module_simplified`` lacks Dynamo's bookkeeping."""
    with _eager_backward_lowering(), _without_autograd_cache():
        return _aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


Halves = tuple[fx.GraphModule, fx.GraphModule]
Cut = Callable[[fx.GraphModule], Halves]


class WrappedPartitioner(CustomPartitionerFn):
    """A partitioner with passes around it.

    The public hook for joint graphs (``joint_custom_post_pass``) is Inductor's alone; a partitioner serves
    eager lowering too. ``split`` gets the joint graph, the number of its outputs that are the forward's, and a
    function that partitions such a graph. Inductor's cache key holds :meth:`uuid`.
    """

    def __init__(self, split: Callable[[fx.GraphModule, int, Cut], Halves], identity: str) -> None:
        self._split = split
        self._inner = torch._inductor.config.custom_partitioner_fn
        self._identity = identity if self._inner is None else f"{identity} around {self._inner.uuid()}"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Halves:
        inner = self._inner if self._inner is not None else min_cut_rematerialization_partition

        def cut(joint: fx.GraphModule) -> Halves:
            return inner(joint, joint_inputs, **kwargs)

        return self._split(gm, kwargs["num_fwd_outputs"], cut)

    def uuid(self) -> str:
        return self._identity

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self._identity,)  # what Inductor's cache key sees of it


def forget_mutation_regions(graph: fx.Graph) -> None:
    """Has Inductor's graph passes look again where a graph writes to memory.

    They don't move a node across such a place, but keep what they found out on nodes: before the graph was
    partitioned, when nothing wrote anywhere.
    """
    for node in graph.nodes:
        node.meta.pop("mutation_region_id", None)


def remove_what_does_nothing(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Removes copies and casts that change nothing, as Inductor does before it lowers a graph.

    It does so whatever is written in between. What reads a copy of a slot's memory then reads the slot, which must be
    known when slots are assigned.
    """
    if any(map(_does_nothing, gm.graph.nodes)):
        _compile_fx.fake_tensor_prop(gm, inputs)  # examples say what shares memory; some date from earlier removals
        _post_grad.remove_noop_ops(gm.graph)


def remove_whole_views(gm: fx.GraphModule) -> None:
    """Has what reads a view of all of a slot read the slot itself.

    Inductor does so when it has taken down what each node is, takes all that follows for changed, and computes most
    examples of the graph anew.
    """
    _post_grad.remove_noop_ops(gm.graph)
    gm.recompile()


def _does_nothing(node: fx.Node) -> bool:
    if node.target not in _post_grad.noop_registry:
        return False
    condition, place = _post_grad.noop_registry[node.target]
    source = node.args[place] if isinstance(place, int) else place(node.args)
    known, args, kwargs = _get_fake_args_kwargs(node)
    if not (known and isinstance(source, fx.Node) and _post_grad.same_meta(node, source)):
        return False
    return bool(condition(*args, **kwargs))


def rounds_as_operators() -> dict[str, bool]:
    """Options of Inductor by which Triton's kernels round each division and product as PyTorch's operators do."""
    return _known_options(
        {"eager_numerics.division_rounding", "emulate_divison_rounding", "emulate_precision_casts"}, True
    )


def passes_left_out() -> dict[str, bool]:
    """What Inductor is not to do with graphs of ours, whatever the user says."""
    always = (
        # The schedule is ours: what reads a slot must not move behind its next launch.
        "reorder_for_peak_memory",
        "reorder_for_locality",
        # They would be put together behind the check.
        "combo_kernels",
        # It copies gathered weights into padded ones, where this rank has found that faster by trying.
        "shape_padding",
        # Its sums over rows are new tensors wherever they are to be stored: gradients of norms would be lost.
        "triton.mix_order_reduction",
        # Shards would be copied to where the CUDA graph was recorded.
        "triton.cudagraphs",
    )
    where_there_are = {
        # They write slots, and nobody reads there what is written: it replaces scatters in place by others, and has
        # the kernels of the program store to memory that nobody allocates.
        "partitioned_scatter_enabled",
        "epilogue_fusion_user_defined_triton_kernel",
        # They have all ranks meet in each graph's compilation, of which each rank, or host, does some alone.
        "distributed_max_autotune_gemm",
        "aten_distributed_optimizations.spmd_check",
        # It takes parameters to be aligned as the slots are that they lie in.
        "triton.enable_persistent_tma_matmul",
        # It moves nodes behind the checks of their order.
        "reorder_for_compute_comm_overlap",
    }
    return dict.fromkeys(always, False) | _known_options(where_there_are, False)


def _known_options(names: set[str], value: bool) -> dict[str, bool]:
    """Those of the options that this version of Inductor has."""
    return dict.fromkeys(sorted(names & set(torch._inductor.list_options())), value)


def emulates_precision_casts() -> bool:
    """Whether Inductor rounds wherever PyTorch's operators do, also where it fuses a cast with one back."""
    return torch._inductor.config.emulate_precision_casts


# Lowered to a choice of kernels, of which few are generated, and none fused with what reads or writes a slot.
_EXTERN_KERNELS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_int_mm", "convolution"}
    | {"_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
    | {"_sparse_semi_structured_mm"}
)


def generates_code_for(target: Any) -> bool:
    """Whether Inductor writes kernels for an operator itself, rather than calling PyTorch's."""
    if not isinstance(target, OpOverload) or target in _lowering.fallbacks:
        return False
    return target in _lowering.lowerings and target.overloadpacket.__name__ not in _EXTERN_KERNELS


def generate_sums_into(operator: OpOverload) -> None:
    """Has Inductor generate the kernel of ``operator(out, value, dims, keepdim)``, which stores the sum in ``out``.

    For a ``copy_`` of a sum it would store the sum, and read it again to store it where it belongs.
    """

    def lower(out: Any, value: Any, dims: Sequence[int], keepdim: bool) -> None:
        total = _lowering.lowerings[torch.ops.aten.sum.dim_IntList](value, dims, keepdim, dtype=out.get_dtype())
        _ir.MutationLayoutSHOULDREMOVE.realize_into(total, out, unsafe_alias=True)  # safe: nothing else reads it

    _lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def store_as_computed(graph: fx.Graph, bases: Mapping[fx.Node, fx.Node]) -> None:
    """Has Inductor store what matrix products read in the shape in which it is computed.

    Where two products read a view of something, Inductor would copy it into the view's shape, by a kernel that is often
    not fused with what computes it: of an attention's gradients one for each of its projections.

    Args:
        bases: for each node, the one whose memory it lies in.
    """
    for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        for base in {bases[operand] for operand in product.all_input_nodes}:
            value = base.meta["val"]  # several, of an operator such as max or topk
            if generates_code_for(base.target) and isinstance(value, torch.Tensor) and value.is_contiguous():
                base.meta["inductor_realize_to_strides"] = True


# What the partitioner has call operators that draw random numbers, where they run a second time.
SAVES_RNG_STATE = rng_prims.run_and_save_rng_state
RESTORES_RNG_STATE = rng_prims.run_with_rng_state
RESTORES_RNG_STATE_IN_PLACE = rng_prims.graphsafe_run_with_rng_state


@functools.cache
def out_variant(target: OpOverload) -> OpOverload | None:
    """The form of an operator that writes its one result to ``out=``, if PyTorch has one that was written by hand:
    those that were generated compute the result first and copy it.
    """
    arguments = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for name in target.overloadpacket.overloads():
        overload = getattr(target.overloadpacket, name)
        taken = [(argument.name, str(argument.type)) for argument in overload._schema.arguments]
        if taken == [*arguments, ("out", "Tensor")] and torch.Tag.generated not in overload.tags:
            return overload
    return None


def caches_generated_code() -> bool:
    """Whether Inductor finds the code of a graph that another process has compiled."""
    return torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches


def inductor_cache_folder() -> str:
    """Where Inductor keeps what it has compiled: ``TORCHINDUCTOR_CACHE_DIR``, or a folder that it chooses. Makes it."""
    return _cache_dir()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or what it wraps, only has a shape: Dynamo and AOTAutograd are tracing."""
    return _is_fake(tensor)


def is_traced_to_operators(tensor: DTensor) -> bool:
    """Whether AOTAutograd or torch.export is tracing, which takes a function apart, where Dynamo keeps it whole."""
    return isinstance(tensor._local_tensor, FunctionalTensor) or get_proxy_mode() is not None


def operators_traced_into() -> list[Any]:
    """The higher-order operators (scan, cond) whose bodies Dynamo is tracing in this thread, the innermost first."""
    tracer = InstructionTranslator.current_tx().output.current_tracer
    operators = []
    while tracer.parent is not None:
        operators.append(tracer.source_target)
        tracer = tracer.parent
    return operators


def outside_tracing() -> AbstractContextManager[Any]:
    """Inside it operators run, whatever is tracing: for what a tensor does when its elements are asked for."""
    return _disable_current_modes()


def profiled_to_the_end(device: torch.device) -> bool:
    """Whether a collective launched now must be waited for before the profiler stops: gloo's call back into the
    profiler that has seen them begin when they are waited for, and crash if it is gone.
    """
    return device.type == "cpu" and torch._C._autograd._profiler_enabled()


class ReceivesGradients(Protocol):
    """The context of an autograd function, by what it keeps there."""

    buffer: Any
    reduces: bool
    params: tuple[Any, ...]


def backward_node() -> Any:
    """The autograd node that this thread is running, None outside of backwards. No public name tells a backward which
    forward's it is."""
    return torch._C._current_autograd_node()


def will_run(function: ReceivesGradients) -> bool:
    """Whether the backward that is running comes to it: it does not where ``torch.autograd.grad`` asks for others."""
    return torch._C._will_engine_execute_node(function)  # type: ignore[arg-type]


def left_out(function: ReceivesGradients) -> list[Any]:
    """The leaves it gives gradients to whose ``.grad`` the backward that is running does not add to:
    ``backward(inputs=...)`` names others, or ``torch.autograd.grad`` returns their gradients."""
    leaves = zip(function.params, function.next_functions, strict=True)  # type: ignore[attr-defined]
    return [leaf for leaf, (node, _) in leaves if not _adds_to_grad(node)]


def _adds_to_grad(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # of leaves whose gradient is returned it can't say
        return False


def in_backward() -> bool:
    """Whether this thread is running an autograd backward."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Calls ``function`` when the backward that is running has run, as DistributedDataParallel does; not compiled."""
    torch.autograd.Variable._execution_engine.queue_callback(torch.compiler.disable(function))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What a process group, which has a backend for each type of device, uses for one. No public name gives it."""
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long what a group sends from a type of device may take. Public calls take it, and none tells it.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL the backend is wrapped in one that checks, which before 2.12 has no options.
    """
    backend = backend_of(group, device)
    return getattr(backend, "wrapped_pg", backend).options._timeout


def group_beside(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Another process group of the same ranks, numbered alike, over gloo, with the same timeout; all make it together.

    The public ``new_group``, called by these ranks alone, names a group by how many groups a rank is in: where these
    are not as many for all, they wait for each other in vain. ``name`` tells it from others beside the same group.
    """
    store = PrefixStore(f"vescale/{group.group_name}/{name}", default_store())
    rank, size, gloo = group.rank(), group.size(), dist.ProcessGroup.BackendType.GLOO
    beside = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout_of(group, torch.device("cpu")))
    beside._register_backend(torch.device("cpu"), gloo, backend)
    beside._set_default_backend(gloo)
    beside._set_group_name(f"{group.group_name} {name}")  # type: ignore[arg-type]
    return beside


def never_start_tracing_at(*functions: Callable[..., Any]) -> None:
    """Dynamo goes on inlining them, but compiles none of them by itself where its caller is not compiled."""
    for function in functions:
        torch._dynamo.eval_frame.skip_code(function.__code__)


def _eager_backward_lowering() -> AbstractContextManager[None]:
    """The backward is lowered with the forward, so that it is verified before anything runs."""
    return torch._functorch.config.patch(force_non_lazy_backward_lowering=True)


def _without_autograd_cache() -> AbstractContextManager[None]:
    """A hit in AOTAutograd's cache leaves out all passes. Inductor's caches stay on."""
    return torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)


def honor_torch_dispatch(subclass: type[torch.Tensor]) -> None:
    """Lets a subclass of DTensor dispatch by its own ``__torch_dispatch__``, as PyTorch 2.12 and later do.

    PyTorch 2.11 sends subclasses through DTensor's C++ path (fixed by pytorch pull request 177878), but asks the
    registry of ``torch.library.register_torch_dispatch`` first. That holds rules for single operators; this adds
    one for all of them.
    """
    if torch.__version__ >= "2.12":
        return
    own = vars(subclass)["__torch_dispatch__"].__func__
    registered = GenericTorchDispatchRuleHolder.find

    def find(self: GenericTorchDispatchRuleHolder, torch_dispatch_class: type) -> Callable[..., Any] | None:
        return registered(self, torch_dispatch_class) or (own if torch_dispatch_class is subclass else None)

    GenericTorchDispatchRuleHolder.find = find  # type: ignore[method-assign]


def shows_graphs() -> bool:
    """Whether depyf has replaced the function that :func:`show_graph` calls, by the code of its own."""
    shown = torch._dynamo.utils.lazy_format_graph_code  # type: ignore[attr-defined]
    return "depyf" in Path(shown.__code__.co_filename).parts


def show_graph(name: str, gm: fx.GraphModule) -> None:
    """Formats a graph through the function that depyf replaces, so that its dumps hold the graph too."""
    torch._dynamo.utils.lazy_format_graph_code(name, gm)  # type: ignore[attr-defined]


def run_boxed(gm: fx.GraphModule) -> CompiledGraph:
    """The graph as it is, called with one list that it empties: inputs are freed after their last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
