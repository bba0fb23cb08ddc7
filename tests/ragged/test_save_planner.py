"""``vc.SavePlanner``: the checkpoints of PyTorch's planner, planned in time for thousands of ranks."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import shard, world_mesh
from ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, default_planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_compile as vc
from vescale_compile.ragged.checkpoint import run_to_items
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.ragged.save_planner import evenly

pytestmark = pytest.mark.slow  # left out of `make test-fast`

SHAPE = (6, 5, 2)
FULL = torch.arange(60.0).reshape(SHAPE)


@on_ranks(3)
def test_a_planner_for_many_ranks_compares_no_two_pieces_that_are_runs(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_planner, "_check_box_overlap", mock.Mock(side_effect=AssertionError))
        state = {"x": shard(FULL, RaggedShard((0, 1, 2), (7, 0, 53)))}
        dcp.save(state, checkpoint_id=tmp_path, planner=vc.SavePlanner())
    dcp.load(state := {"x": torch.zeros(SHAPE)}, checkpoint_id=tmp_path)
    assert torch.equal(state["x"], FULL)


@on_ranks(3)
def test_a_planner_for_many_ranks_takes_other_pieces_too(tmp_path: Path) -> None:
    dcp.save({"x": distribute_tensor(FULL, world_mesh(), [Shard(1)])}, checkpoint_id=tmp_path, planner=vc.SavePlanner())
    dcp.load(state := {"x": torch.zeros(SHAPE)}, checkpoint_id=tmp_path)
    assert torch.equal(state["x"], FULL)


@pytest.mark.parametrize("rows", [[(0, 4), (3, 6)], [(0, 2), (3, 6)], [(0, 3), (3, 7)]], ids=["overlap", "gap", "end"])
def test_a_planner_for_many_ranks_refuses_pieces_that_are_not_the_whole(rows: list[tuple[int, int]]) -> None:
    def plan(start: int, stop: int) -> SavePlan:
        row = math.prod(SHAPE[1:])
        return SavePlan(run_to_items("x", start * row, stop * row, torch.Size(SHAPE), TensorProperties()))

    with pytest.raises(ValueError, match="validat"):
        vc.SavePlanner(flatten_state_dict=False).create_global_plan([plan(*each) for each in rows])


def two_replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def trained(mesh: DeviceMesh) -> dict[str, Any]:
    """Weights and states of a model that took a step."""
    torch.manual_seed(0)
    model = vc.fully_shard(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optim": states}


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    flat, _ = default_planner.flatten_state_dict(state)
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    return {
        name: value.full_tensor() if isinstance(value, vc.RaggedDTensor) else value for name, value in tensors.items()
    }


def check_loads(path: Path, mesh: DeviceMesh) -> None:
    expected = whole(trained(mesh))
    state = trained(mesh)
    for value in default_planner.flatten_state_dict(state)[0].values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    dcp.load(state, checkpoint_id=path)
    loaded = whole(state)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


class Listening(vc.SavePlanner):
    """Counts who sends what."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.sent = Counter(item.index for plan in all_plans for item in plan.items)
        self.plans = all_plans
        return super().create_global_plan(all_plans)


@on_ranks(4)
def test_one_rank_sends_what_replicas_have_and_how_many_steps_a_parameter_took(tmp_path: Path) -> None:
    planner = Listening()
    dcp.save(trained(two_replicas()), checkpoint_id=tmp_path, planner=planner)
    if dist.get_rank() == 0:
        by_all = ("running", "num_batches", "param_groups")
        assert {n for index, n in planner.sent.items() if not any(part in index.fqn for part in by_all)} == {1}
        assert all(plan.items for plan in planner.plans)  # they share the work
    check_loads(tmp_path, two_replicas())


@on_ranks(2)
def test_shards_of_one_replica_send_each_step_once(tmp_path: Path) -> None:
    planner = Listening()
    mesh = init_device_mesh("cpu", (2,))
    dcp.save(trained(mesh), checkpoint_id=tmp_path, planner=planner)
    if dist.get_rank() == 0:
        steps = {index.fqn: count for index, count in planner.sent.items() if index.fqn.endswith(".step")}
        assert len(steps) == 6 and set(steps.values()) == {1}
    check_loads(tmp_path, mesh)


@on_ranks(4)
@pytest.mark.parametrize("flatten", [True, False])
def test_a_checkpoint_has_what_that_of_the_default_planner_has(tmp_path: Path, flatten: bool) -> None:
    def stored(planner: DefaultSavePlanner, name: str) -> dict[str, object]:
        state = trained(two_replicas())
        dcp.save(state if flatten else state["model"], checkpoint_id=tmp_path / name, planner=planner)
        entries = FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata
        return {
            name: sorted(map(str, entry.chunks)) if isinstance(entry, TensorStorageMetadata) else str(entry)
            for name, entry in entries.items()
        }

    ours = stored(vc.SavePlanner(flatten_state_dict=flatten), "ours")
    assert ours == stored(DefaultSavePlanner(flatten_state_dict=flatten), "default")


@on_ranks(4)
def test_ranks_that_save_without_their_replicas_save_all(tmp_path: Path) -> None:
    mesh = two_replicas()
    state = trained(mesh)
    if mesh.get_local_rank("replicate") == 1:
        dcp.save(state, checkpoint_id=tmp_path, planner=vc.SavePlanner(), process_group=mesh.get_group("shard"))
    dist.barrier()
    check_loads(tmp_path, mesh)


@on_ranks(4)
def test_replicas_that_have_other_names_are_refused_on_all_ranks(tmp_path: Path) -> None:
    mesh = two_replicas()
    replica = mesh.get_local_rank("replicate")
    state = {f"{name}@{replica}": value for name, value in trained(mesh)["model"].items()}
    with pytest.raises(CheckpointException, match=r"no rank would save '.*Give all replicas the same names"):
        dcp.save(state, checkpoint_id=tmp_path, planner=vc.SavePlanner())


@on_ranks(2)
def test_a_rank_that_saves_alone_may_hold_nothing_of_a_parameter(tmp_path: Path) -> None:
    state = {"x": shard(FULL, RaggedShard((0, 1, 2), (0, 60))), "y": torch.ones(2)}
    where = tmp_path / str(dist.get_rank())
    dcp.save(state, checkpoint_id=where, planner=vc.SavePlanner(), no_dist=True)
    dcp.load(loaded := {"y": torch.zeros(2)}, checkpoint_id=where, no_dist=True)
    assert torch.equal(loaded["y"], torch.ones(2))


def test_shares_are_about_as_large_as_one_another() -> None:
    shares = evenly({"a": 7, "b": 4, "c": 3, "d": 1, "e": 1}, 2)
    assert shares == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
