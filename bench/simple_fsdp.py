"""SimpleFSDP (arXiv 2411.00284) as a baseline: sharded parameters without hooks, all of it in one compiled graph.

Each parameter is a DTensor of row shards, and reading it redistributes it to a replica: an all-gather in the
forward, and by autograd a reduce-scatter in the backward. ``torch.compile`` sees both as ordinary operators of one
graph, and Inductor's own passes bucket and schedule them: on GPUs those that plan by estimated times; on CPUs, where
these can't run, those that launch as early and wait as late as dependencies allow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import bucketing  # noqa: F401  # defines operators that code found in a cache calls
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.utils import flop_counter
from torch.utils.checkpoint import CheckpointPolicy
from workload import Forward, Policy, Workload

MB = 2**20
"""as Inductor measures buckets"""


def simple_fsdp(model: nn.Module, workload: Workload, policy: Policy, *, bucketed: bool) -> Forward:
    """Shards the model's parameters in place and returns it compiled.

    Args:
        bucketed: whether Inductor joins the collectives of about one decoder layer into one.
    """
    layer_numel = _layer_numel(model)
    mesh = init_device_mesh(workload.device, (torch.distributed.get_world_size(),))
    gather = _Gather(workload.mixed_precision)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            # Unsafe: a shard's replica is no DTensor, and in mixed precision of another dtype.
            parametrize.register_parametrization(module, name, gather, unsafe=True)
    options: dict[str, Any] = {}
    if policy is Policy.RESHARD:
        options["joint_custom_post_pass"] = _GatherAgain()
    if workload.device == "cuda":  # the scheduler asks the driver for the GPU's speed
        options |= _overlap(bucketed)
        count_grouped_attention()
    else:
        options |= _early_and_late()
        if bucketed:
            options |= _bucketing(layer_numel, workload.mixed_precision)
    return torch.compile(model, dynamic=False, fullgraph=True, options=options)


class _Gather(nn.Module):
    """The parametrization: a parameter's replica from its shards. Gradients are averaged, as FSDP2 does."""

    def __init__(self, precision: MixedPrecisionPolicy) -> None:
        super().__init__()
        self.precision = precision

    def forward(self, shard: DTensor) -> Tensor:
        replica = shard.redistribute(
            placements=[Replicate()],
            forward_dtype=self.precision.param_dtype,
            backward_dtype=self.precision.reduce_dtype,
        )
        return replica.to_local(grad_placements=[Partial("avg")])


class _GatherAgain(CustomGraphPass):
    """Marks the gathers of the joint graph for recomputation in the backward.

    With them goes everything between shard and gather, and what is computed from gathered parameters alone: were
    a cast or a copy of one saved, nothing would be gained. The partitioner saves collectives unless told so.
    """

    def __call__(self, graph: fx.Graph) -> None:
        from_parameters: set[fx.Node] = set()
        for node in graph.nodes:
            if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default:
                from_parameters |= {node, *_computed_before(node)}
            elif (
                node.op == "call_function" and node.all_input_nodes and from_parameters.issuperset(node.all_input_nodes)
            ):
                from_parameters.add(node)
        for node in from_parameters:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    def uuid(self) -> str:
        return "simple_fsdp: gather again in the backward"


def _computed_before(gather: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    queue = list(gather.all_input_nodes)
    while queue:
        node = queue.pop()
        if node.op == "call_function":
            found.append(node)
            queue.extend(node.all_input_nodes)
    return found


def _overlap(bucketed: bool) -> dict[str, Any]:
    """Inductor's options to schedule collectives under compute, and to bucket them as the schedule allows."""
    options = {"enable_overlap_scheduling": True, "collective_bucketing": bucketed}
    if hasattr(config.aten_distributed_optimizations, "pre_bucketing_fsdp_collectives"):  # not in older releases
        options["pre_bucketing_fsdp_collectives"] = bucketed
    return {f"aten_distributed_optimizations.{name}": value for name, value in options.items()}


@functools.cache
def count_grouped_attention() -> None:
    """From now on PyTorch's counter of operations, which the scheduler asks, takes attention with fewer heads of keys
    and values than of queries, which it refuses in PyTorch 2.11: they are read as if repeated."""
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        setattr(flop_counter, name, _with_heads_repeated(getattr(flop_counter, name)))


def _with_heads_repeated(count: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(count)
    def repeated(*shapes: Sequence[int]) -> int:
        heads = max(shape[1] for shape in shapes)
        return count(*((shape[0], heads, *shape[2:]) for shape in shapes))

    return repeated


def _early_and_late() -> dict[str, Any]:
    """Inductor's options to launch collectives as early, and to wait for them as late, as dependencies allow."""
    passes = ["raise_comms", "sink_waits"]
    return {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": passes}


def _bucketing(layer_numel: int, precision: MixedPrecisionPolicy) -> dict[str, Any]:
    """Inductor's options to join collectives up to one layer's; it measures a bucket by the unsharded tensors."""
    options: dict[str, Any] = {}
    for kind, dtype in (("all_gathers", precision.param_dtype), ("reduce_scatters", precision.reduce_dtype)):
        layer_mb = layer_numel * (dtype or torch.float32).itemsize / MB
        options[f"bucket_{kind}_fx"] = "all"
        options[f"bucket_{kind}_fx_bucket_size_determinator"] = functools.partial(_bucket_mb, layer_mb)
    return options


def _layer_numel(model: nn.Module) -> int:
    """Elements of the largest decoder layer's parameters."""
    layers = model.get_submodule("layers").children()
    return max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)


def _bucket_mb(size: float, index: int) -> float:
    """Inductor asks for the size of each bucket by its number."""
    return size
