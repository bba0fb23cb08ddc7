"""A rank that measures what the cost model asks of it, and trains what the compiler has predicted."""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import fx
from worker import Trainer
from workload import LEARNING_RATE, Policy

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.cost import Cluster, Device, MeasuredCollective
from vescale_compile.cost.calibrate import calibrate
from vescale_compile.cost.calibrate_collectives import calibrate_collectives
from vescale_compile.cost.collectives import ALL_GATHER, REDUCE_SCATTER
from vescale_compile.cost.operators import measure_operators
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.passes.context import Part
from vescale_compile.passes.prediction import Prediction
from vescale_compile.report import GraphReport
from vescale_compile.runtime.arrivals import settle

_WARMUP = 2
_UPDATES = 3


@dataclass(frozen=True)
class Forecast:
    """What the compiler predicted of a step, and what is measured beside it. Times in seconds.

    Attributes:
        parameters: of the model.
        forward, backward: the graphs'.
        optimizer: measured: the optimizer's step is in no graph. While it begins, the last reductions end.
    """

    parameters: int
    forward: Prediction
    backward: Prediction
    optimizer: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward.seconds + self.backward.seconds + max(0.0, self.optimizer - self.backward.tail)


class Forecaster(Trainer):
    """Its orders, besides those of a trainer. Those before ``join`` need no process group."""

    def measure_device(self, sizes: tuple[LlamaConfig, ...]) -> Device:
        """This host's device, with the operators of the sizes' training steps as they run here."""
        nodes: list[fx.Node] = []
        measured = calibrate(dtypes=[torch.float32]).device
        tokens = torch.empty(self.job.workload.batch, self.job.workload.seq, dtype=torch.int64, device="meta")
        for config in sizes:
            with torch.device("meta"):
                model = Llama(config)
            on_graph = functools.partial(_collect, nodes)
            vc.simulate(model, tokens, tokens, cluster="h100", world_size=2, on_graph=on_graph)
        return replace(measured, operators=measure_operators(nodes))

    def measure_collectives(self) -> dict[str, MeasuredCollective]:
        """Over the wire as it is now: those of a step."""
        return calibrate_collectives(kinds=(ALL_GATHER, REDUCE_SCATTER))

    def prepare(self, config: LlamaConfig, cluster: Cluster) -> Forecast:
        """Builds and compiles a model for a cluster, and takes some steps; ``step`` takes more."""
        torch._dynamo.reset()
        job, reports = self.job, list[GraphReport]()
        torch.manual_seed(job.workload.seed)
        self.model = vc.fully_shard(Llama(config), reshard_after_forward=job.policy is Policy.RESHARD)
        backend = functools.partial(vescale, options={"cluster": cluster}, on_compiled=reports.append)
        self.forward = torch.compile(self.model, backend=backend, dynamic=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.batch = job.workload.build_batch(self.rank)
        for _ in range(_WARMUP):
            self._train()
        optimizer = statistics.median(self._update_seconds() for _ in range(_UPDATES))
        (report,) = reports
        numel = sum(param.numel() for param in self.model.parameters())
        forward, backward = (report.parts[part].prediction for part in (Part.FORWARD, Part.BACKWARD))
        return Forecast(numel, forward, backward, optimizer)

    def _update_seconds(self) -> float:
        self.gradients()
        settle()  # what the backward has left in flight
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def _collect(nodes: list[fx.Node], graph: fx.Graph) -> None:
    nodes.extend(graph.nodes)
