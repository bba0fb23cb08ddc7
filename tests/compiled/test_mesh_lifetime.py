"""Meshes that ``fully_shard`` makes and keeps last as long as the process group, and no longer."""

import gc
from weakref import ref

import pytest
import torch.distributed as dist
from ranks import fake_world
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vescale_compile as vc


def two_dimensions() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))


def mesh_of(model: nn.Module) -> DeviceMesh:
    return next(model.parameters()).device_mesh  # type: ignore[return-value]


@pytest.mark.parametrize("make_mesh", [lambda: None, two_dimensions], ids=["all ranks", "two dimensions"])
def test_a_process_group_that_is_destroyed_goes(make_mesh):
    with fake_world(8):
        group = ref(mesh_of(vc.fully_shard(nn.Linear(4, 8), mesh=make_mesh())).get_group())
    gc.collect()
    assert group() is None


@pytest.mark.parametrize("make_mesh", [lambda: None, two_dimensions], ids=["all ranks", "two dimensions"])
def test_models_share_a_mesh_though_the_first_is_gone(make_mesh):
    with fake_world(8):
        mesh = make_mesh()
        first = ref(mesh_of(vc.fully_shard(nn.Linear(4, 8), mesh=mesh)))
        gc.collect()
        assert mesh_of(vc.fully_shard(nn.Linear(4, 8), mesh=mesh)) is first()


def test_models_share_a_mesh_though_it_is_sliced_for_each():
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "replicate", "shard"))
        first, second = (mesh_of(vc.fully_shard(nn.Linear(4, 8), mesh=mesh["shard"])) for _ in range(2))
        assert first is second
        first, second = (mesh_of(vc.fully_shard(nn.Linear(4, 8), mesh=mesh["replicate", "shard"])) for _ in range(2))
        assert first is second


def test_a_mesh_with_other_names_stays_apart():
    with fake_world(8):
        vc.fully_shard(nn.Linear(4, 8))
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
        assert mesh_of(vc.fully_shard(nn.Linear(4, 8), mesh=mesh)) == mesh


def test_a_store_that_is_used_again_brings_back_no_mesh():
    store = dist.HashStore()
    meshes = []
    for _ in range(2):
        dist.init_process_group("fake", store=store, rank=0, world_size=8)
        meshes.append(mesh_of(vc.fully_shard(nn.Linear(4, 8))))
        dist.destroy_process_group()
    assert meshes[0] is not meshes[1]
