"""Stages of torch.distributed.pipelining, each sharded over the ranks that have it."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`

MICRO_BATCHES = 4


class Layers(nn.Module):
    """Layers ``first`` to ``last``; their names are those in the whole."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): models.Block() for i in range(first, last)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


class AccumulatingStage(PipelineStage):
    """Reduces gradients once, after the last micro-batch."""

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        last = chunk == MICRO_BATCHES - 1
        with contextlib.nullcontext() if last else vc.no_sync(self.submod):
            return super().forward_one_chunk(chunk, *args, **kwargs)


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))


class Pipeline:
    """Two ranks after one another, each with ``turns`` stages of two layers; two such pipelines share parameters."""

    def __init__(self, turns: int = 1, stage: type[PipelineStage] = PipelineStage) -> None:
        self.mesh = mesh()
        self.place = self.mesh["pipeline"].get_local_rank()
        torch.manual_seed(0)
        self.unsharded = Layers(0, 4 * turns)
        self.modules, stages = [], []
        for number in range(self.place, 2 * turns, 2):
            module = Layers(2 * number, 2 * number + 2)
            module.load_state_dict(self.unsharded.state_dict(), strict=False)
            vc.fully_shard(module, mesh=self.mesh["shard"])
            module.compile(backend="vescale", options={"lowering": "eager"})
            self.modules.append(module)
            group = self.mesh["pipeline"].get_group()
            stages.append(stage(module, number, 2 * turns, torch.device("cpu"), group=group))
        loss = nn.functional.mse_loss
        self._schedule: Any = (
            Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss)
            if turns == 1
            else ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss)
        )

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: param for module in self.modules for name, param in module.named_parameters()}

    def backward(self, step: int) -> None:
        inputs, target = self._batch(step, self.mesh["shard"].get_local_rank())
        first, last = self.place == 0, self.place == 1
        self._schedule.step(*([inputs] if first else []), **({"target": target} if last else {}))

    def backward_unsharded(self, step: int) -> None:
        for inputs, target in (self._batch(step, shard) for shard in range(2)):
            (nn.functional.mse_loss(self.unsharded(inputs), target) / 2).backward()

    def _batch(self, step: int, shard: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(2 * step + shard)
        inputs, target = torch.randn(2, 2 * MICRO_BATCHES, 13, generator=generator)
        return inputs, target


@pytest.mark.parametrize(("turns", "stage"), [(1, PipelineStage), (2, AccumulatingStage)])
@on_ranks(4)
def test_gradients_are_those_of_the_unsharded_layers(turns, stage):
    pipeline = Pipeline(turns, stage)
    theirs = dict(pipeline.unsharded.named_parameters())
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (pipeline.named_parameters.values(), theirs.values())]
    for step in range(2):
        pipeline.backward(step)
        pipeline.backward_unsharded(step)
        for name, param in pipeline.named_parameters.items():
            torch.testing.assert_close(param.grad.full_tensor(), theirs[name].grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_micro_batches_under_no_sync_are_reduced_once():
    sent = []
    for stage in (PipelineStage, AccumulatingStage):
        pipeline = Pipeline(stage=stage)
        pipeline.backward(0)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            pipeline.backward(1)
        sent.append([event.name for event in profiled.events()].count("c10d::send"))
    units = 2
    assert sent[0] - sent[1] == (MICRO_BATCHES - 1) * units


@on_ranks(4)
def test_a_checkpoint_of_stages_is_one_of_the_whole(tmp_path: Path):
    pipeline = Pipeline()
    state = {name: value for module in pipeline.modules for name, value in get_model_state_dict(module).items()}
    dcp.save(state, checkpoint_id=tmp_path)
    whole = vc.fully_shard(Layers(0, 4))
    assert whole.layers["0"].up.weight.device_mesh.size() == dist.get_world_size()
    loaded = get_model_state_dict(whole)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert models.largest_difference(whole, pipeline.unsharded) == 0.0
