"""What Inductor does to graphs, and has code for.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import compile_fx as _compile_fx
from torch._inductor import ir as _ir
from torch._inductor import lowering as _lowering
from torch._inductor.fx_passes import post_grad as _post_grad
from torch._inductor.fx_utils import get_fake_args_kwargs as _get_fake_args_kwargs
from torch._ops import OpOverload

from ..schemas import is_functional_collective, is_pointwise


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


_BEGINS_AT_OPERAND = "storage_offset_relative_to_input_storage" in inspect.signature(_lowering.as_strided).parameters
"""Whether ``as_strided`` without an offset begins where its operand does, as in eager mode (not in 2.11)."""


def begin_at_operands(graph: fx.Graph, bases: Mapping[fx.Node, fx.Node]) -> None:
    """Has ``as_strided`` begin where its operand does if the program gave it no offset. Lowered as it is, it may begin
    where the memory does that the operand is a view of, which of a parameter is another's. So it becomes a view of that
    memory itself: of a view, Inductor may make a copy first, in which an offset counts otherwise.

    Args:
        bases: by node, whose memory its result is a view of.
    """
    operators = (
        () if _BEGINS_AT_OPERAND else (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)
    )
    for node in (node for each in operators for node in graph.find_nodes(op="call_function", target=each)):
        base, operand = bases[node.args[0]], node.args[0].meta["val"]
        memory = base.meta["val"]
        known = isinstance(memory, torch.Tensor) and memory.dtype == operand.dtype
        if known and len(node.args) < 4 and node.kwargs.get("storage_offset") is None:
            node.args = (base, *node.args[1:3], operand.storage_offset() - memory.storage_offset())


def _does_nothing(node: fx.Node) -> bool:
    if node.target not in _post_grad.noop_registry:
        return False
    condition, place = _post_grad.noop_registry[node.target]
    source = node.args[place] if isinstance(place, int) else place(node.args)
    known, args, kwargs = _get_fake_args_kwargs(node)
    if not (known and isinstance(source, fx.Node) and _post_grad.same_meta(node, source)):
        return False
    return bool(condition(*args, **kwargs))


# Lowered to a choice of kernels, of which few are generated, and none fused with what reads or writes a slot.
_EXTERN_KERNELS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_int_mm", "convolution"}
    | {"_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
    | {"_sparse_semi_structured_mm"}
)


# Besides what is tagged as pointwise, operators of whose results each element is computed where it is read: their
# lowerings are an ``ir.Pointwise`` that nothing realizes.
_INLINED = frozenset(
    {"arange", "constant_pad_nd", "copy", "full", "glu", "iota", "lift_fresh_copy", "repeat", "rev"}
    | {"scalar_tensor", "select_scatter", "slice_scatter", "diagonal_copy", "as_strided_copy"}
    | {"embedding", "gather", "index", "_unsafe_index", "_unsafe_masked_index"}
    | {f"{upsample}{dims}d" for upsample in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)}
)

# What is realized, but as a loop that Inductor may fuse with those of its readers: then it stays in registers.
_LOOPS = frozenset(
    {"sum", "mean", "prod", "amax", "amin", "max", "min", "any", "argmax", "argmin", "var", "var_mean", "xor_sum"}
    | {"cat", "prepare_softmax_online", "avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward"}
    | {"_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices"}
    | {"_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices"}
    | {"max_pool2d_with_indices_backward", "upsample_nearest2d_backward", "bucketize", "searchsorted"}
    | {"inductor_lookup_seed", "inductor_randint", "inductor_random", "inductor_seed", "inductor_seeds"}
)


def generates_code_for(target: Any) -> bool:
    """Whether Inductor writes kernels for an operator itself, rather than calling PyTorch's."""
    if not isinstance(target, OpOverload) or target in _lowering.fallbacks:
        return False
    if is_functional_collective(target):  # calls, though not among the fallbacks
        return False
    return target in _lowering.lowerings and target.overloadpacket.__name__ not in _EXTERN_KERNELS


def is_inlined(target: Any) -> bool:
    """Whether Inductor computes an operator's result, element by element, in the kernel that reads or stores it."""
    return generates_code_for(target) and (is_pointwise(target) or target.overloadpacket.__name__ in _INLINED)


def may_stay_in_registers(target: Any) -> bool:
    """Whether an operator's result need not be in memory for generated code that reads it.

    That of a scatter, of a sort, or of what writes to a part of a copy has to be complete before any of it is read.
    """
    return is_inlined(target) or (generates_code_for(target) and target.overloadpacket.__name__ in _LOOPS)


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
