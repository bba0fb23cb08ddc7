"""Inductor, as a compiler with options and caches.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import compile_fx as _compile_fx
from torch._inductor.async_compile import AsyncCompile as _AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen as _PythonWrapper
from torch._inductor.cpu_vec_isa import pick_vec_isa as _pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir as _cache_dir

from .aot import eager_backward_lowering, without_autograd_cache


@functools.cache
def examined_cpu() -> threading.Thread:
    """Finds out, beside its caller, which vector instructions there are to generate: join it before code is generated.

    Inductor asks when it first generates code for a CPU, and compiles and runs one small program after another: seconds
    in which nothing else would happen.
    """
    examination = threading.Thread(target=_pick_vec_isa, daemon=True)  # who asks again gets the answer, or the error
    examination.start()
    return examination


def inductor_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any] | None = None,
    config_patches: dict[str, Any] | None = None,
    *,
    cached: bool,
) -> Callable[..., Any]:
    """Inductor on a Dynamo graph. ``inner_compile`` sees each partitioned graph before Inductor lowers it.

    ``cached`` lets AOTAutograd's cache, where the user has it on, stand in front of all this.
    """
    with eager_backward_lowering(), nullcontext() if cached else without_autograd_cache():
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


def rounds_as_operators() -> dict[str, bool]:
    """Options of Inductor by which Triton's kernels round each division and product as PyTorch's operators do."""
    return {"eager_numerics.division_rounding": True, "emulate_precision_casts": True}


def passes_left_out() -> dict[str, bool | None]:
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
        # It replaces scatters into slots by others, of which nobody reads what they write.
        "partitioned_scatter_enabled",
        # All ranks would meet in each graph's compilation, of which each rank, or host, does some alone.
        "distributed_max_autotune_gemm",
        # It takes parameters to be aligned as the slots are that they lie in.
        "triton.enable_persistent_tma_matmul",
        # It moves nodes behind the checks of their order.
        "reorder_for_compute_comm_overlap",
    )
    where_there_are = {  # from torch 2.12 or 2.13
        # The kernels of the program would store to memory that nobody allocates, where slots are to be written.
        "epilogue_fusion_user_defined_triton_kernel": False,
        # As distributed_max_autotune_gemm.
        "aten_distributed_optimizations.spmd_check": False,
        # Of a program that records CUDA graphs in a way of its own.
        "cudagraph_policy": None,
    }
    known = torch._inductor.list_options()
    newer = {option: value for option, value in where_there_are.items() if option in known}
    return dict.fromkeys(always, False) | newer


def cudagraph_options() -> list[str]:
    """Those by which the program asks for CUDA graphs."""
    values = {
        "triton.cudagraphs": torch._inductor.config.triton.cudagraphs,
        "cudagraph_policy": getattr(torch._inductor.config, "cudagraph_policy", None),
    }
    return [option for option, value in values.items() if value]


def emulates_precision_casts() -> bool:
    """Whether Inductor rounds wherever PyTorch's operators do, also where it fuses a cast with one back."""
    return torch._inductor.config.emulate_precision_casts


def caches_generated_code() -> bool:
    """Whether Inductor finds the code of a graph that another process has compiled."""
    return torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches


def inductor_cache_folder() -> str:
    """Where Inductor keeps what it has compiled: ``TORCHINDUCTOR_CACHE_DIR``, or a folder that it chooses. Makes it."""
    return _cache_dir()
