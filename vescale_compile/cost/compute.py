"""Time of the nodes of an aten graph, from the shapes of their fake tensors alone.

A kernel takes the larger of its arithmetic and its memory traffic (roofline). Arithmetic is that of matrix
products, convolutions and attention (:mod:`.flops`). Everything else is bound by memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.flop_counter import FlopCounterMode

from vescale_compile.cost.devices import Device
from vescale_compile.cost.flops import flops
from vescale_compile.rng_calls import plain_node
from vescale_compile.schemas import has_results, is_functional_collective, is_view, readers, written_by
from vescale_compile.torch_internals.inductor_graphs import generates_code_for
from vescale_compile.torch_internals.tracing import size_hint

_aten = torch.ops.aten

# Operators that read of their first argument only what they return.
_LOOKUPS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})

# Operators that Inductor has code for and doesn't fuse with what reads them: what scatters writes where an index says,
# so that all of it has to have run; sorts of most sizes are PyTorch's own; and an allocation holds nothing yet.
_SCATTERS = {"index_put", "index_put_", "_unsafe_index_put", "_unsafe_index_put_", "scatter", "scatter_"}
_SCATTERED_SUMS = {"scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"}
_SORTS = {"sort", "topk", "kthvalue", "median", "mode"}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_UNFUSED = _SCATTERS | _SCATTERED_SUMS | _SORTS | _ALLOCATIONS

_UNIT_COMMUNICATION = (
    "all_gather",
    "reduce_scatter",
    "start_",
    "wait_",
    "carry_",
    "take_",
    "leave_",
    "cast_when_read",  # by whoever reads it
)  # how their names in "vescale" begin


def compute_seconds(nodes: Iterable[fx.Node], device: Device, *, fused: bool = True) -> dict[fx.Node, float]:
    """Seconds that each node takes on a device.

    Views, constants, inputs and outputs take none. Nor do collectives and waits, which are not computation.

    Args:
        nodes: of an aten graph with ``meta["val"]``, in topological order.
        device: where they run.
        fused: whether what passes between pointwise operators and reductions stays in registers, as Inductor has
            it: then only what enters and leaves a group of them is memory traffic, and a group is launched once.
    """
    nodes = list(nodes)
    formulas: Mapping[Any, Callable[..., int]] = FlopCounterMode(display=False).flop_registry
    return {node: _seconds(plain_node(node) or node, device, formulas, fused) for node in nodes}


def issue_seconds(seconds: Mapping[fx.Node, float], device: Device, *, fused: bool = True) -> dict[fx.Node, float]:
    """Seconds that the host of a device takes to launch each node's kernel; a node that joins another's takes none, nor
    does one that takes the device no time.

    Args:
        seconds: what :func:`compute_seconds` says of the nodes.
        device, fused: as it was given.
    """
    return {node: device.issue * bool(taken and not _joins(node, fused)) for node, taken in seconds.items()}


def operator_key(node: fx.Node) -> str:
    """What a node's time depends on: its operator, and shape, strides and dtype of its tensors."""
    tensors = (tensor for source in node.all_input_nodes for tensor in _tensors(source.meta.get("val")))
    described = (
        f"{tensor.dtype}{[size_hint(size) for size in tensor.shape]}{[size_hint(stride) for stride in tensor.stride()]}"
        for tensor in tensors
    )
    return f"{node.target}({', '.join(described)})"


def stays_in_registers(node: fx.Node) -> bool:
    """Whether a result is computed and read by generated kernels alone: fused, they don't write it to memory."""
    return _fusible(node) and bool(node.users) and all(map(_fusible, readers(node)))


def _seconds(node: fx.Node, device: Device, formulas: Mapping[Any, Callable[..., int]], fused: bool) -> float:
    if isinstance(node.target, HigherOrderOperator):
        return _whole_seconds(node, device, flops(node, formulas))
    if not _computes(node):
        return 0.0
    count = flops(node, formulas)
    if count and device.operators and (measured := device.operators.get(operator_key(node))) is not None:
        return measured
    inside = fused and _fusible(node)
    traffic = _bytes_read(node, inside) + _bytes_written(node, inside)
    seconds = device.seconds(count, traffic, _factor_dtype(node, device) if count else "")
    return seconds - device.launch_overhead if _joins(node, fused) else seconds


def _joins(node: fx.Node, fused: bool) -> bool:
    """Whether a node is computed by a kernel that others have begun."""
    return fused and _fusible(node) and any(_fusible(source) for source in _sources(node))


def _whole_seconds(node: fx.Node, device: Device, count: int) -> float:
    """Of an operator that takes programs and is one kernel, as flex attention. 0 for those whose arithmetic is not
    known: control flow, wrappers."""
    if not count:
        return 0.0
    read = _size(tensor for source in node.all_input_nodes for tensor in _tensors(source.meta.get("val")))
    return device.seconds(count, read + _size(_tensors(node.meta.get("val"))), _factor_dtype(node, device))


def _computes(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_view(node):
        return False
    return not _communicates(node.target) and any(True for _ in _written(node))


def _communicates(target: OpOverload) -> bool:
    if target.namespace == "vescale":
        return target.name().removeprefix("vescale::").startswith(_UNIT_COMMUNICATION)
    return is_functional_collective(target)


def _fusible(node: fx.Node) -> bool:
    """Whether Inductor computes the node in a kernel that it generates, with what it reads and what reads it."""
    if not isinstance(node.target, OpOverload) or not _computes(node):
        return False
    return generates_code_for(node.target) and node.target.overloadpacket.__name__ not in _UNFUSED


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose results a node reads, seen through views."""
    for source in node.all_input_nodes:
        if is_view(source):
            yield from _sources(source)
        else:
            yield source


def _bytes_read(node: fx.Node, inside: bool) -> int:
    assert isinstance(node.target, OpOverload)
    sources = list(node.all_input_nodes)
    if node.target.overloadpacket in _LOOKUPS:
        return _size(_written(node)) + sum(_size(_tensors(source.meta.get("val"))) for source in sources[1:])
    if inside:
        sources = [
            source for source in sources if not all(map(_fusible, _sources(source) if is_view(source) else [source]))
        ]
    if not has_results(node.target):
        written = written_by(node)
        sources = [source for source in sources if source not in written]
    return sum(_size(_tensors(source.meta.get("val"))) for source in sources)


def _bytes_written(node: fx.Node, inside: bool) -> int:
    if inside and stays_in_registers(node):
        return 0
    return _size(_written(node))


def _written(node: fx.Node) -> Iterator[Tensor]:
    """A node's results; of an operator that returns nothing, the arguments that it writes to."""
    if isinstance(node.target, OpOverload) and not has_results(node.target):
        for source in written_by(node):
            yield from _tensors(source.meta.get("val"))
    yield from _tensors(node.meta.get("val"))


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; what is expanded is counted once."""
    total = 0
    for tensor in tensors:
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        total += math.prod(size_hint(size) for size, stride in dims if size_hint(stride)) * tensor.element_size()
    return total


def _factor_dtype(node: fx.Node, device: Device) -> str:
    """The device's name for the dtype that a matrix product is computed in: of its floating-point factors, if any."""
    written = written_by(node)  # sums may be of another dtype
    read = [source for source in node.all_input_nodes if source not in written]
    factors = [tensor.dtype for source in read for tensor in _tensors(source.meta.get("val"))]
    dtypes = factors or [tensor.dtype for tensor in _written(node)]
    dtype = next((each for each in dtypes if each.is_floating_point), dtypes[0])
    name = str(dtype).removeprefix("torch.")
    if name == "float32" and "tf32" in device.peak_flops and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "float8" if name.startswith("float8") else name


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
