"""Graphs and their shapes, and what traces them.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import eval_frame
from torch._dynamo.source import ConstantSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as _is_fake
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def tracing_fake_mode() -> FakeTensorMode:
    """The fake tensor mode of the compilation in progress; new graph inputs must belong to it."""
    mode = torch._guards.TracingContext.get().fake_mode
    assert mode is not None
    return mode


def allow_what_depends_on_values() -> None:
    """Lets the compilation in progress have operators whose results are as large as their inputs' values say, as an
    assignment through a mask has, or numbers, as the backward of a ``while_loop`` asks for. Dynamo would break the
    graph for them, but not where calls are allowed in it whose insides it does not see."""
    env = tracing_fake_mode().shape_env
    assert env is not None
    env.settings = dataclasses.replace(env.settings, allow_dynamic_output_shape_ops=True, allow_scalar_outputs=True)


def runs_before_compilation() -> bool:
    """Whether a call of what is compiled runs as it is, once, as ``torch.compiler.set_stance("eager_then_compile")``
    has it."""
    return eval_frame._stance.stance == "eager_then_compile" and callable(get_eval_frame_callback())


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


def ends_in_graph_break(gm: fx.GraphModule) -> bool:
    """Whether Dynamo has more of the frame to capture after this graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def turns_grad_on(gm: fx.GraphModule) -> bool:
    """Whether a graph, of a frame that is called under ``torch.no_grad``, has a part in ``torch.enable_grad``."""
    target = torch._C._set_grad_enabled
    return any(node.target is target and node.args[0] for node in all_nodes(gm))


def names_a_stream(node: fx.Node) -> bool:
    """Whether the program has chosen the stream that a node of Dynamo's graph runs on, or has it order streams, note
    events, or wait for what a GPU does."""
    given = [arg.meta.get("example_value") for arg in node.all_input_nodes]
    chosen = (node.meta.get("custom") or {}).get("stream") is not None
    orders = node.op == "call_function" and str(node.target).startswith("streams.")
    return chosen or orders or any(isinstance(arg, torch.Stream | torch.Event) for arg in given)


def all_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Those of a module's graph, and of its regions': checkpoints, ``autograd.Function``, and the like."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return (node for graph in graphs for node in graph.nodes)


def overload_called(operator: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload | None:
    """The one that a call with these arguments is of, as TorchScript resolves it; None if none takes them."""
    try:
        return getattr(operator, torch._C._jit_resolve_packet(operator._qualified_op_name, *args, **kwargs))
    except RuntimeError:
        return None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or what it wraps, only has a shape: Dynamo and AOTAutograd are tracing."""
    return _is_fake(tensor)


def is_traced_to_operators(tensor: DTensor) -> bool:
    """Whether AOTAutograd or torch.export is tracing, which takes a function apart, where Dynamo keeps it whole."""
    return isinstance(tensor._local_tensor, FunctionalTensor) or get_proxy_mode() is not None


def is_tracing() -> bool:
    """Whether Dynamo, or AOTAutograd, is tracing in this thread."""
    return torch._guards.TracingContext.try_get() is not None


def operators_traced_into() -> list[Any]:
    """The higher-order operators (scan, cond) whose bodies Dynamo is tracing in this thread, the innermost first."""
    if not is_tracing():
        return []
    tracer = InstructionTranslator.current_tx().output.current_tracer
    operators = []
    while tracer.parent is not None:
        operators.append(tracer.source_target)
        tracer = tracer.parent
    return operators


def never_start_tracing_at(*functions: Callable[..., Any]) -> None:
    """Dynamo goes on inlining them, but compiles none of them by itself where its caller is not compiled."""
    for function in functions:
        torch._dynamo.eval_frame.skip_code(function.__code__)


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
