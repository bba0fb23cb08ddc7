"""``simulate``: the step time, exposed communication and memory of a model on a described cluster, without one.

The model's shapes go through the compiler's own passes and scheduler, as rank 0 of a process group whose collectives
do nothing, up to where Inductor would generate code. Nothing is allocated and nothing is computed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from .backend import own_errors, vescale
from .cost import OPTIMIZERS, Cluster, OptimizerCost, host
from .hardware import cluster_for
from .mesh import simulated_on
from .passes.context import Part
from .passes.prediction import Phase, seconds_one_after_another
from .quantities import size_text, time_text
from .ragged.dtensor import RaggedDTensor
from .report import GraphReport
from .runtime.life import life
from .sharding import fully_shard
from .torch_internals.tracing import shapes_only

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Simulation:
    """What one training step of a rank is predicted to take. Times in seconds, memory in bytes.

    Attributes:
        cluster: that it was predicted for.
        optimizer: whose states and step are counted.
        graphs: each compiled graph, with the prediction and the peak of its parts.
        trained: how many parameters are.
        trained_bytes: of this rank's shards of them.
    """

    cluster: Cluster
    optimizer: OptimizerCost
    graphs: tuple[GraphReport, ...]
    trained: int
    trained_bytes: int

    @property
    def optimizer_seconds(self) -> float:
        """Of the optimizer's step, on the device."""
        return self.optimizer.seconds(self.trained_bytes, self.cluster.device) if self.trained_bytes else 0.0

    @property
    def step_seconds(self) -> float:
        """Of forward, backward and the optimizer's step, one after another, from a device at rest to a device at
        rest."""
        parts = [graph.parts for graph in self.graphs]
        forwards = [summary for each in parts for part, summary in each.items() if part is not Part.BACKWARD]
        backwards = [each[Part.BACKWARD] for each in reversed(parts) if Part.BACKWARD in each]
        phases = [summary.prediction.phase for summary in (*forwards, *backwards)]
        return seconds_one_after_another([*phases, self._update])

    @property
    def compute_seconds(self) -> float:
        """Of the computation in forward and backward, with the device to itself."""
        return self._sum("compute")

    @property
    def communication_seconds(self) -> float:
        """Of the collectives, each with the wire to itself."""
        return self._sum("communication")

    @property
    def exposed_seconds(self) -> float:
        """In which the computation stands still and waits for collectives."""
        return self._sum("exposed")

    @property
    def starved_seconds(self) -> float:
        """In which the computation stands still until its host, which launches kernel after kernel, has come to it."""
        at_work = sum(map(self._sum, ("compute", "exposed", "slowdown"))) + self.optimizer_seconds
        return max(0.0, self.step_seconds - at_work)

    @property
    def least_seconds(self) -> float:
        """What no schedule of these graphs can beat, the optimizer's step included, which may begin while the last
        reductions are under way."""
        of_host = self._sum("least_issued") + self._update.issued
        return max(self._sum("least_fed"), self._sum("compute") + self.optimizer_seconds, of_host)

    @property
    def state_bytes(self) -> int:
        """Of the optimizer's states."""
        return self.optimizer.state_bytes(self.trained_bytes)

    @property
    def peak_bytes(self) -> int:
        """The fullest moment of a step: shards, slots, gradients, activations, and the optimizer's states. Of a model
        with graph breaks, that of its fullest graph, with what those before it keep for their backwards."""
        return max((graph.peak_bytes for graph in self.graphs), default=0) + self.state_bytes

    @property
    def lacking_bytes(self) -> int:
        """By which the fullest moment exceeds the memory of a device; 0 where it fits, and where the device's is not
        known. A step that lacks memory would not run."""
        return self.cluster.device.lacks(self.peak_bytes)

    @property
    def _update(self) -> Phase:
        """The optimizer's step."""
        issued = self.cluster.device.of_host(host.PARAMETER_UPDATE * self.trained)
        return Phase(max(self.optimizer_seconds, issued), self.optimizer_seconds, issued)

    def _sum(self, what: str) -> float:
        return sum(getattr(part.prediction, what) for graph in self.graphs for part in graph.parts.values())

    def __str__(self) -> str:
        if not self.graphs:
            return "the model's forward reads no parameters, so there is nothing to predict"
        rows = [
            ("step", time_text(self.step_seconds), "forward, backward and the optimizer's step"),
            ("  lower bound", time_text(self.least_seconds), "no schedule takes less"),
            ("  computation", time_text(self.compute_seconds), ""),
            ("  exposed", time_text(self.exposed_seconds), f"of {time_text(self.communication_seconds)} on the wire"),
            ("  starved", time_text(self.starved_seconds), "until the host has launched what is next"),
            ("  optimizer", time_text(self.optimizer_seconds), self.optimizer.name),
            ("peak memory", size_text(self.peak_bytes), f"{size_text(self.state_bytes)} of it the optimizer's states"),
        ]
        if self.lacking_bytes:
            rows.append(
                ("  too much by", size_text(self.lacking_bytes), "a device has less, so the step would not run")
            )
        return "\n".join(
            [str(self.cluster), *(f"{what:<14} {value:>10}  {note}".rstrip() for what, value, note in rows)]
        )


def simulate(
    model: nn.Module,
    *args: Any,
    cluster: str | Cluster,
    world_size: int,
    memory_budget: float | str | None = None,
    shard: Callable[[nn.Module], object] = fully_shard,
    optimizer: OptimizerCost = OPTIMIZERS["adamw"],
    on_graph: Callable[[fx.Graph], None] | None = None,
    **kwargs: Any,
) -> Simulation:
    """Predicts a training step of a model on a described cluster, with no such cluster.

    It stands in for rank 0 of a fake process group, which it makes and destroys; every rank's step is alike. The same
    arguments give the same prediction. Times are the cost model's (see ``vescale_compile.cost``): operators at the
    roofline of the device, collectives by latency and bandwidth. Attention is taken to run as PyTorch runs it on a
    CPU: fused, without a matrix of scores. Dynamo is reset before and after: what this process has compiled is compiled
    anew when it is called again.

    Args:
        model: unsharded, and left as it is. On the meta device it takes no memory.
        args, kwargs: of its forward; of tensors only shapes and dtypes count. In training mode the backward is
            predicted too.
        cluster: a :class:`vescale_compile.cost.Cluster`, the name of a preset ("h100"), or a calibration's file.
        world_size: ranks.
        memory_budget: what a step may take on a rank, optimizer states apart: bytes, text such as "40GB", or a share of
            the device's memory such as "90%", of which two states for each trained parameter are left out. None: what
            gathering and reducing one unit ahead takes, or more where that saves more of the time than it takes of the
            memory.
        shard: called with a copy of the model that only has shapes, to shard it; for example ``lambda model:
            vc.fully_shard(model, mp_policy=...)``.
        optimizer: one of ``vescale_compile.cost.OPTIMIZERS``, or another description.
        on_graph: called with each final graph; ``vescale_compile.cost.operators.measure_operators`` measures its nodes.

    Returns:
        The step's times in seconds and its memory in bytes on a rank, with the reports of its graphs; printed, a table.

    Raises:
        ValueError: a cluster that does not exist; no ranks; a budget that makes no sense; a model that is sharded
            already, or that ``shard`` does not shard; an argument of ``fully_shard`` that the model does not name.
        GraphError: no schedule fits in the budget, or a graph that can't be compiled.
        RuntimeError: this process has joined a process group that is not a fake one of ``world_size`` ranks.
    """
    if any(isinstance(param, RaggedDTensor) for param in model.parameters()):
        raise ValueError(
            "simulate: the model is sharded already, for its own process group. Give it before fully_shard, and say "
            "with shard=... how it is to be sharded"
        )
    _refuse_arguments_of_fully_shard(model, kwargs)
    described = cluster_for(cluster, _CPU, world_size)
    graphs: list[GraphReport] = []
    mode = shapes_only()
    options = {"cluster": described, "memory_budget": memory_budget}
    backend = functools.partial(
        vescale, options=options, on_compiled=graphs.append, on_graph=on_graph, generate_code=False
    )
    with _fake_group(world_size), _nothing_compiled():
        shapes = _shapes_of(model, mode)
        with simulated_on("cuda" if described.device.has_host else "cpu"):
            shard(shapes)
        trained = [p for p in shapes.parameters() if isinstance(p, RaggedDTensor) and p.requires_grad]
        if not any(isinstance(param, RaggedDTensor) for param in shapes.parameters()):
            raise ValueError(
                "simulate: shard(model) sharded nothing; it is to call fully_shard on the model it is given"
            )
        inputs = _shapes_by_id(pytree.tree_leaves((args, kwargs)), mode)
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: inputs[id(tensor)], (args, kwargs))
        with own_errors(), mode:
            torch.compile(shapes, backend=backend)(*args, **kwargs)
        trained_bytes = sum(param.to_local().nbytes for param in trained)
    return Simulation(described, optimizer, tuple(graphs), len(trained), trained_bytes)


def _refuse_arguments_of_fully_shard(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """A model whose forward takes any keyword, as Hugging Face's do, would say nothing of them."""
    named, ours = (inspect.signature(each).parameters for each in (model.forward, fully_shard))
    for name in kwargs.keys() & ours.keys() - named.keys():
        raise ValueError(
            f"simulate: {name} is an argument of fully_shard, and would be given to the model's forward, which does "
            f"not name it. Give shard=lambda model: vescale_compile.fully_shard(model, {name}=...)"
        )


@contextlib.contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` ranks whose collectives do nothing; the one there is, if it is such a group."""
    if dist.is_initialized():
        backend, ranks = dist.get_backend(), dist.get_world_size()
        if (backend, ranks) != ("fake", world_size):
            raise RuntimeError(
                f"[rank {dist.get_rank()}] simulate: this process is in a {backend} process group of {ranks} ranks, "
                f"and the simulation needs a fake one of {world_size}. Simulate in a process of its own, or after "
                "torch.distributed.destroy_process_group()"
            )
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """What Dynamo compiles for a model's shapes must not be found by, nor count against, what is to run; nor may what
    was decided for either hold for the other."""
    torch._dynamo.reset()
    try:
        with mock.patch.dict(life().answers, clear=True):
            yield
    finally:
        torch._dynamo.reset()


def _shapes_of(model: nn.Module, mode: AbstractContextManager[Any]) -> nn.Module:
    """A copy of a module whose tensors only have shapes."""
    tensors = (
        value
        for part in model.modules()
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
    )
    return copy.deepcopy(model, _shapes_by_id(tensors, mode))


def _shapes_by_id(values: Iterable[object], mode: AbstractContextManager[Any]) -> dict[int, Any]:
    """By the ``id`` of each tensor among the values, one that only has its shape: what was one tensor stays one."""
    found: dict[int, Any] = {}
    for value in values:
        if isinstance(value, Tensor) and id(value) not in found:
            found[id(value)] = _shape_of(value, mode)
    return found


def _shape_of(tensor: Tensor, mode: AbstractContextManager[Any]) -> Tensor:
    with mode:
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(shape, requires_grad=tensor.requires_grad)
    return shape.requires_grad_(tensor.requires_grad)
