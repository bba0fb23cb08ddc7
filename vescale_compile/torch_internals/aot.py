"""AOTAutograd: the joint graph, its halves, and how they run.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._prims import rng_prims
from torch.fx.graph import _BoxedCodeGen


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]] = min_cut_rematerialization_partition,
) -> Callable[..., Any]:
    """AOTAutograd with our compilers. The public ``aot_module_simplified`` lacks Dynamo's bookkeeping."""
    with eager_backward_lowering(), without_autograd_cache():
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


# What the partitioner has call operators that draw random numbers, where they run a second time.
SAVES_RNG_STATE = rng_prims.run_and_save_rng_state
RESTORES_RNG_STATE = rng_prims.run_with_rng_state
RESTORES_RNG_STATE_IN_PLACE = rng_prims.graphsafe_run_with_rng_state


def eager_backward_lowering() -> AbstractContextManager[None]:
    """The backward is lowered with the forward, so that it is verified before anything runs."""
    return torch._functorch.config.patch(force_non_lazy_backward_lowering=True)


def without_autograd_cache() -> AbstractContextManager[None]:
    """A hit in AOTAutograd's cache leaves out all passes. Inductor's caches stay on."""
    return torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)


def run_boxed(gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph as it is, called with one list that it empties: inputs are freed after their last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
