"""What Inductor does to graphs, and has code for.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

import functools
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
