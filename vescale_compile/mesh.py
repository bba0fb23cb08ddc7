"""The device mesh that ``fully_shard`` is given: which of its dimensions shards, and which replicates."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from .ragged.dtensor import RaggedDTensor
from .runtime.life import ranks_of
from .torch_internals.groups import default_store

_sharding_ranks: ContextVar[int] = ContextVar("ranks that fully_shard is sharding over")
_simulated: ContextVar[str] = ContextVar("type of the devices that a simulation's mesh stands for")


@dataclass(frozen=True)
class DataParallelMesh:
    """A 1-D mesh that shards; or a 2-D mesh, dimension 0 of which replicates and dimension 1 shards.

    The meaning of dimensions is that of ``torch.distributed.fsdp.fully_shard`` (hybrid sharding, HSDP).

    Attributes:
        whole: all ranks, over which gradients are averaged.
        shard: 1-D: the ranks that hold one copy of the parameters between them; parameters are DTensors over it.
    """

    whole: DeviceMesh
    shard: DeviceMesh

    @property
    def where(self) -> str:
        """How messages begin."""
        return f"[rank {self.whole.get_rank()}] "

    @property
    def device_type(self) -> str:
        """That the ranks compute on."""
        return _simulated.get(self.shard.device_type)


@contextmanager
def simulated_on(device_type: str) -> Iterator[None]:
    """Meanwhile models are sharded as for such devices, whatever their meshes are of."""
    token = _simulated.set(device_type)
    try:
        yield
    finally:
        _simulated.reset(token)


@contextmanager
def sharding_over(mesh: DataParallelMesh) -> Iterator[None]:
    """While granularities are asked for: what :func:`sharding_ranks` tells them."""
    token = _sharding_ranks.set(mesh.shard.size())
    try:
        yield
    finally:
        _sharding_ranks.reset(token)


def sharding_ranks() -> int:
    """How many ranks hold one copy of the parameters, for a granularity that depends on it.

    Inside ``fully_shard`` those of its mesh's dimension that shards; elsewhere all of the default process group.
    """
    return _sharding_ranks.get(dist.get_world_size() if dist.is_initialized() else 1)


def whole_mesh(tensor: DTensor) -> DeviceMesh:
    """All ranks that train a sharded tensor: those of its mesh and, with hybrid sharding, of its replicas."""
    whole = getattr(tensor._spec, "whole", None)
    return tensor.device_mesh if whole is None else whole


def spread_mesh(tensor: DTensor) -> DeviceMesh | None:
    """All ranks of a model that other ranks have others of such a tensor of; None if they haven't, or none is known."""
    return getattr(tensor._spec, "spread", None)


def note_spread(params: Iterable[nn.Parameter]) -> None:
    """Tells the parameters of a model, or of a part, which of them other ranks of it have others of."""
    meshes = {param: whole_mesh(param) for param in params if isinstance(param, RaggedDTensor)}
    ranks = {mesh: set(ranks_of(mesh)) for mesh in dict.fromkeys(meshes.values())}
    everyone, largest = set[int]().union(*ranks.values()), max(ranks, key=DeviceMesh.size, default=None)
    for param, mesh in meshes.items():
        if ranks[mesh] != everyone:
            param._spec = copy.copy(param._spec)  # which copies of the parameter have too
            param._spec.spread = largest


def data_parallel_mesh(module: nn.Module, mesh: DeviceMesh | None) -> DataParallelMesh:
    """Reads ``fully_shard(module, mesh=mesh)``: None means all ranks, on the device that the parameters are on.

    Raises:
        RuntimeError: there is no process group.
        TypeError: not a mesh.
        ValueError: a mesh of three or more dimensions, of two without names, or without this rank; or one on a device
            that its process group can't communicate from.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard: no process group. Call torch.distributed.init_process_group first (under torchrun, or "
            "with rank and world_size)."
        )
    unsaid = mesh is None
    if mesh is None:
        mesh = mesh_of_all_ranks(_device_type(module))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"[rank {dist.get_rank()}] fully_shard: mesh is {mesh!r}; give a DeviceMesh, as "
            "torch.distributed.device_mesh.init_device_mesh makes, or None for all ranks"
        )
    where = f"[rank {dist.get_rank()}] fully_shard: the mesh {mesh} "
    if mesh.ndim > 2:
        raise ValueError(
            f"{where}has {mesh.ndim} dimensions; give a 1-D mesh to shard over, such as mesh['shard'], or a 2-D mesh "
            "whose first dimension replicates and whose second shards, such as mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{where}does not have this rank; call fully_shard on the ranks of the mesh alone")
    _check_communicates(mesh, where)
    if unsaid:
        _warn_of_idle_gpus(mesh)
    names = mesh.mesh_dim_names
    if mesh.ndim == 2 and names is None:
        raise ValueError(
            f"{where}has two dimensions without names; name them, as in "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
        )
    given = _meshes().given
    key = mesh.device_type, names, tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    if key not in given:
        given[key] = DataParallelMesh(mesh, mesh if names is None or mesh.ndim == 1 else mesh[names[1]])
    return given[key]


@dataclass
class _Meshes:
    """Each would be another object at each call of ``fully_shard``, and PyTorch compares all ranks of meshes that are
    not one object. They are not found by equality: equal meshes may have groups of their own.
    """

    of_all_ranks: dict[tuple[dist.ProcessGroup, str], DeviceMesh] = field(default_factory=dict)  # and type of device
    given: dict[tuple[Any, ...], DataParallelMesh] = field(default_factory=dict)  # by type of device, names and groups


# PyTorch lets go of the default group's store when the group is destroyed. Of the group nothing would tell: meshes keep
# their groups.
_of_stores: WeakKeyDictionary[Store, _Meshes] = WeakKeyDictionary()


def _meshes() -> _Meshes:
    return _of_stores.setdefault(default_store(), _Meshes())


def mesh_of_all_ranks(device_type: str) -> DeviceMesh:
    """The one mesh of all ranks on such devices, over the default process group."""
    world = dist.group.WORLD
    assert world is not None
    meshes, key = _meshes().of_all_ranks, (world, device_type)
    if key not in meshes and device_type == "cpu":
        # Where there is a GPU, init_device_mesh would make another group for CPUs, without this one's timeout.
        meshes[key] = DeviceMesh.from_group(world, device_type)
    elif key not in meshes:
        meshes[key] = init_device_mesh(device_type, (dist.get_world_size(),))
    return meshes[key]


def _check_communicates(mesh: DeviceMesh, where: str) -> None:
    backends = dist.get_backend_config(mesh.get_group(mesh.ndim - 1))
    device = mesh.device_type
    if device not in {pair.split(":")[0] for pair in backends.split(",")}:
        raise ValueError(
            f"{where}is on {device}, and its process group communicates from other devices ({backends}). Move the "
            f"module to one of them first, or call init_process_group with a backend for {device} too, such as "
            "'cpu:gloo,cuda:nccl'"
        )


def _warn_of_idle_gpus(mesh: DeviceMesh) -> None:
    """Who comes from FSDP2 may expect a model to be moved to them."""
    if mesh.device_type == "cpu" and torch.cuda.is_available() and "nccl" in dist.get_backend_config():
        warnings.warn(
            f"[rank {dist.get_rank()}] fully_shard: the model is on the CPU, and trains there, though this machine has "
            "GPUs and the process group nccl for them. Move the model to this rank's GPU before fully_shard; to train "
            "on the CPU, say so: torch.distributed.init_process_group('gloo')",
            stacklevel=4,
        )


def _device_type(module: nn.Module) -> str:
    devices = {param.device.type for param in module.parameters()} - {"meta"}
    if devices:
        return devices.pop()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"
