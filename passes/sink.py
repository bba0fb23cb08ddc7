"""Lets whatever computes a gradient write it where it will be reduced, so that packing copies nothing.

For each unit a buffer takes the place of ``pack``'s result. Each gradient is followed back through views to what
computes it, and that is told to write into the gradient's place:

- matrix products, by ``vescale::matmul_into``; a sum of products (a weight used several times) accumulates there,
- embeddings, as zeros and an accumulating ``index_put_``, or, on CPUs, by ``vescale::embedding_into``,
- sums (of biases and norms) that Inductor generates code for, by ``vescale::sum_into``,
- what else it generates code for, by ``copy_``, which it fuses into the kernel as its store,
- with eager lowering, any operator that has an ``out=`` form, by that,
- each part of a concatenation, of a parameter that the program splits, by whatever computes it.

What remains is copied, once, and recorded: gradients that something else reads too, that are inputs of the graph, or
that operators compute which can't be told where to write (convolutions, attention); products whose place is not
aligned, where libraries are slower and round otherwise; what is only moved (of a parameter that the program slices);
and what Inductor stores before it places it: other reductions (a mean, a maximum, a sum in fp32 that is reduced in
bf16), sorts, and what writes to parts of a copy (of a parameter whose diagonal the program takes). A gradient of
another dtype than the reduction's is cast on the way; sums and an embedding's rows in bf16, which Inductor adds up in
fp32, stay in fp32 if that is what is reduced, and so do products on NVIDIA's GPUs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from ..runtime import ops
from ..schemas import is_view
from ..torch_internals.inductor import emulates_precision_casts
from ..torch_internals.inductor_graphs import generates_code_for, is_inlined, out_variant
from .context import Buffer, CompileContext, Copied, Lowering, Use
from .edit import allocate, call, order_of, value_of
from .moves import CASTS, moves
from .places import Place

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_SUM = _aten.sum.dim_IntList
_MATMULS = (_aten.mm.default, _aten.bmm.default)
_SCATTERS = (_aten.index_put.default, _aten._unsafe_index_put.default)
_MASKED_SCATTER = _aten._unsafe_masked_index_put_accumulate.default
_SHARED = "read elsewhere too"
_ZEROS = (_aten.full.default, _aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default)


def sink(gm: fx.GraphModule, context: CompileContext) -> None:
    before = order_of(gm.graph)
    buffers = [_replace_pack(node, context, before) for node in before if node.target is ops.pack]
    after = order_of(gm.graph)
    for buffer in buffers:
        min(buffer.users, key=after.__getitem__).prepend(buffer)


def _replace_pack(pack: fx.Node, context: CompileContext, order: dict[fx.Node, int]) -> fx.Node:
    """The buffer that a unit's gradients are written to from now on."""
    graph, value = pack.graph, pack.meta["val"]
    args: tuple[Any, ...] = pack.args
    grads, offsets, views, unused, _, _, unit = args
    with graph.inserting_before(pack):
        buffer = allocate(graph, value.numel(), like=value, mark=Buffer(Use.GRADIENTS, unit))
        for offset, length in zip(unused[::2], unused[1::2], strict=True):
            place = call(graph, _aten.slice.Tensor, buffer, 0, offset, offset + length)
            call(graph, _aten.fill_.Scalar, place, 0)
    pack.replace_all_uses_with(buffer)
    graph.erase_node(pack)
    sinking = _Sinking(graph, context, order, Counter(grads))
    for grad, offset, view in zip(grads, offsets, views, strict=True):
        sinking.unwritten[grad] -= 1
        shape = torch.Size(context.units[unit].views[view].shape)
        sinking.write(grad, Place.of(buffer, offset, unit, shape))
    return buffer


@dataclass(frozen=True)
class _Sinking:
    """The gradients of one unit on their way into its buffer.

    Attributes:
        order: of the graph's nodes, before any were inserted.
        unwritten: gradients that are to be written later, and by how many places. Though nothing in the graph says so,
            they must not be erased before.
    """

    graph: fx.Graph
    context: CompileContext
    order: dict[fx.Node, int]
    unwritten: Counter[fx.Node]

    def write(self, value: fx.Node, place: Place) -> int:
        """Has ``value``, which nothing in the graph reads but for this, written to ``place``.

        Returns the place in the order after which it is there.
        """
        if self._is_shared(value) or value.op != "call_function":
            return self._copy(value, place, "an input of the graph" if value.op == "placeholder" else _SHARED)
        if before := place.before(value):
            return self.write(self._drop(value), before)
        if self._only_rounds(value) and place.fits(value_of(value.all_input_nodes[0])):
            return self.write(self._drop(value), place)
        if not (place.fits(value_of(value)) or self._gives_its_sums(value, place)):
            return self._copy(value, place, f"{_operator(value)} gives another dtype")
        if value.target in _MATMULS:
            if not place.aligned:
                return self._copy(value, place, "its place is not aligned to 16 bytes")
            return self._insert_and_drop(value, ops.matmul_into, place, *value.args, False)
        if value.target is _SUM and value.args[1] and self.context.lowering is Lowering.INDUCTOR:
            source, dims, keepdim = (*value.args, False)[:3]
            return self._insert_and_drop(value, ops.sum_into, place, source, dims, keepdim)
        on_gpu = place.buffer.meta["val"].device.type == "cuda"  # where rows can only be added up in any order
        if value.target is _aten.embedding_dense_backward.default and not value.args[4] and not on_gpu:
            grad, indices, _, padding, _ = value.args
            return self._insert_and_drop(value, ops.embedding_into, place, grad, indices, padding)
        if self._is_scatter(value):
            with self.graph.inserting_before(value):
                call(self.graph, _aten.fill_.Scalar, place.insert(), 0)
            return self._scatter(value, place)
        if value.target is _aten.cat.default and (last := self._write_parts(value, place)) is not None:
            return last
        if self.context.lowering is Lowering.EAGER:
            return self._write_out(value, place)
        accumulates = value.target is _aten.add.Tensor and not value.kwargs
        if accumulates and (last := self._accumulate(value, place)) is not None:
            return last
        return self._copy(value, place, f"computed by {_operator(value)}")

    def _is_shared(self, value: fx.Node, readers: int = 0) -> bool:
        """Whether more than ``readers`` read a value, or it is a gradient that has another place too."""
        return len(value.users) > readers or self.unwritten[value] > 0

    def _only_rounds(self, value: fx.Node) -> bool:
        """A cast that may be left out where its reader casts again."""
        return self._leaves_out_rounding and value.target in CASTS

    @property
    def _leaves_out_rounding(self) -> bool:
        """Inductor does so in kernels that it generates, unless it was told to round as operators do."""
        return self.context.lowering is Lowering.INDUCTOR and not emulates_precision_casts()

    def _gives_its_sums(self, value: fx.Node, place: Place) -> bool:
        """Whether a sum or matrix product of half precision can be had as the fp32 that it is summed up in."""
        result, wanted = value_of(value), place.layout
        if value.target not in (*_MATMULS, _SUM) or result is None or result.dtype not in _HALF:
            return False
        given = self._leaves_out_rounding and (value.target is _SUM or self.context.float32_products)
        return given and wanted.dtype == torch.float32 and result.shape == wanted.shape

    def _write_parts(self, whole: fx.Node, place: Place) -> int | None:
        """Writes each of the tensors that a gradient is concatenated of, as those of a parameter that was split are;
        None if they don't lie one behind another."""
        parts, dim = cast(list[fx.Node], whole.args[0]), whole.args[1] if len(whole.args) > 1 else 0
        shapes = [value_of(part).shape for part in parts]  # type: ignore[union-attr]
        if dim not in (0, -len(place.shape)) or place.steps or any(len(shape) != len(place.shape) for shape in shapes):
            return None
        if len(set(parts)) != len(parts) or not all(isinstance(size, int) for shape in shapes for size in shape):
            return None
        self.graph.erase_node(whole)
        last, offset = 0, place.offset
        for part, shape in zip(parts, shapes, strict=True):
            last = max(last, self.write(part, Place.of(place.buffer, offset, place.unit, shape)))
            offset += shape.numel()
        return last

    def _accumulate(self, total: fx.Node, place: Place) -> int | None:
        """Writes the earlier summand of two and has the later one, a product or a scatter, added to it."""
        terms = [term for term in total.args if isinstance(term, fx.Node) and place.fits(value_of(term))]
        if len(set(terms)) != 2 or any(self._is_shared(term, readers=1) for term in terms):
            return None
        first, second = sorted(terms, key=self.order.__getitem__)
        source, second_place = self._behind_views(second, place)
        if source.target not in _MATMULS and not self._is_scatter(source):
            return None
        if self.order[source] < self.order[first] or not second_place.fits(value_of(source)) or not place.aligned:
            return None
        self.graph.erase_node(total)
        last = self.write(first, place)
        if last > self.order[source]:
            raise AssertionError(f"{first} is written after {source} is to be added to it")
        while second is not source:
            second = self._drop(second)
        if source.target in _MATMULS:
            return self._insert_and_drop(source, ops.matmul_into, second_place, *source.args, True)
        return self._scatter(source, second_place)

    def _behind_views(self, value: fx.Node, place: Place) -> tuple[fx.Node, Place]:
        while before := place.before(value):
            source = value.all_input_nodes[0]
            if self._is_shared(source, readers=1):
                break
            value, place = source, before
        return value, place

    def _is_scatter(self, value: fx.Node) -> bool:
        """A sum of rows: an index_put of something into zeros, that accumulates."""
        accumulates = value.target in _SCATTERS and len(value.args) > 3 and value.args[3] is True
        if value.target is _MASKED_SCATTER:  # with one index it is an embedding's, whose rows all exist
            accumulates = len(cast(list[Any], value.args[2])) == 1
        if not accumulates:
            return False
        zeros = value.args[0]
        if not isinstance(zeros, fx.Node) or zeros.target not in _ZEROS:
            return False
        return zeros.target is not _aten.full.default or bool(zeros.args[1] == 0)

    def _scatter(self, value: fx.Node, place: Place) -> int:
        zeros = value.args[0]
        indices, rows = self._unmask(value) if value.target is _MASKED_SCATTER else value.args[1:3]
        last = self._insert_and_drop(value, _aten.index_put_.default, place, indices, rows, True)
        if isinstance(zeros, fx.Node) and not self._is_shared(zeros):
            self.graph.erase_node(zeros)
        return last

    def _unmask(self, value: fx.Node) -> tuple[list[fx.Node], fx.Node]:
        """Indices and rows of an embedding's masked scatter: what the mask leaves out, padding, adds zero."""
        args: tuple[Any, ...] = value.args
        _, mask, indices, rows = args
        with self.graph.inserting_before(value):
            like = rows.meta["val"]
            zero = call(self.graph, _aten.full.default, [], 0, dtype=like.dtype, device=like.device)
            rows = call(self.graph, _aten.where.self, mask, rows, zero)
        return indices, rows

    def _write_out(self, value: fx.Node, place: Place) -> int:
        out = out_variant(value.target) if isinstance(value.target, OpOverload) else None
        if out is None:
            return self._copy(value, place, f"computed by {_operator(value)}")
        with self.graph.inserting_before(value):
            call(self.graph, out, *value.args, **value.kwargs, out=place.insert())
        place_in_order = self.order[value]
        self.graph.erase_node(value)
        return place_in_order

    def _copy(self, value: fx.Node, place: Place, why: str) -> int:
        drops = value.target in CASTS and (self._only_rounds(value) or place.fits(value_of(value)))
        if drops and not self._is_shared(value):
            value = self._drop(value)
        shared = self._is_shared(value)
        before = self.graph.find_nodes(op="placeholder")[-1] if value.op == "placeholder" else value
        with self.graph.inserting_before(before.next):
            copy = call(self.graph, _aten.copy_.default, place.insert(), value)
        if shared:
            why = _SHARED
        elif is_store(value, self.context):
            return self.order[value]
        elif _is_generated(source := _behind_any_views(value), self.context):
            why = f"moved by {source.target}" if moves(source) else f"{source.target} is stored before it is placed"
        copy.meta["vescale"] = Copied(place.unit, why)
        return self.order[value]

    def _insert_and_drop(self, value: fx.Node, target: Any, place: Place, *args: Any) -> int:
        """Inserts ``target(place, *args)`` in the stead of ``value``."""
        with self.graph.inserting_before(value):
            call(self.graph, target, place.insert(), *args)
        place_in_order = self.order[value]
        self.graph.erase_node(value)
        return place_in_order

    def _drop(self, view: fx.Node) -> fx.Node:
        """Erases a node that nothing reads any more; returns its argument."""
        source = view.all_input_nodes[0]
        self.graph.erase_node(view)
        return source


def is_store(value: fx.Node, context: CompileContext) -> bool:
    """Whether a copy of a value that nothing else reads is none: the store of the generated kernel that computes it."""
    source = _behind_any_views(value)
    return context.lowering is Lowering.INDUCTOR and is_inlined(source.target) and not moves(source)


def _is_generated(value: fx.Node, context: CompileContext) -> bool:
    return context.lowering is Lowering.INDUCTOR and generates_code_for(value.target)


def _behind_any_views(value: fx.Node) -> fx.Node:
    while value.op == "call_function" and is_view(value):
        value = value.all_input_nodes[0]
    return value


def _operator(value: fx.Node) -> str:
    """The operator that computes a value, be it one of several results."""
    if value.target is getitem:
        return f"{value.all_input_nodes[0].target}, which has several results"
    return str(value.target)
