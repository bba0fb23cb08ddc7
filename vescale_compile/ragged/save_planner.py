"""A planner of checkpoints for thousands of ranks."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh

from ..balance import longest_first
from ..runtime.life import ranks_of
from ..torch_internals.checkpoint import checked_already
from .checkpoint import arguments_of_save
from .dtensor import RaggedDTensor


class SavePlanner(DefaultSavePlanner):
    """For ``torch.distributed.checkpoint.save(..., planner=)``: its default, but for what ranks send to the one that
    plans for all, and for how that one checks it. Checkpoints are the same.

    By default every rank sends all that it could write: replicas of hybrid sharding what all of them have, and every
    rank each optimizer's count of steps, of which one is then chosen. Here one rank alone sends each.

    The default also compares, on that rank while the others wait, nearly every two pieces of a tensor whose longest
    dimension is its last, as a stack of experts often is: for thousands of ranks longer than a collective may take.
    This one sorts pieces that are runs of elements, and leaves to the default what is not made of such.

    Raises:
        ValueError: from ``save``, on all ranks: ranks have replicas of a parameter by different names, so that none
            saves it.
    """

    def create_local_plan(self) -> SavePlan:
        held = self.state_dict
        # What it leaves to others it finds by the names that it sends, flattened ones.
        left = _left_to_others(held, _saving_ranks()) if self.flatten_state_dict else set()
        self.state_dict = {name: value for name, value in held.items() if name not in left}
        try:
            return super().create_local_plan()
        finally:
            self.state_dict = held

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with checked_already(_is_whole):
            plans, metadata = super().create_global_plan(all_plans)
        if len(all_plans) == 1:  # of a rank that saves alone, and leaves nothing to others
            return plans, metadata
        names = (metadata.planner_data or {}).keys() - metadata.state_dict_metadata.keys()
        if unsaved := sorted(name for name in names if not _is_empty(self.state_dict.get(name))):
            raise ValueError(
                f"[rank {dist.get_rank()}] no rank would save {unsaved[0]!r} (and {len(unsaved) - 1} others): "
                "vc.SavePlanner has each replica of a parameter, and of its optimizer's step, save a share of what all "
                "of them have by one name. Give all replicas the same names and no others, or save with PyTorch's own "
                "planner"
            )
        return plans, metadata


def _is_empty(value: object) -> bool:
    """Whether it is a tensor without elements, of which nobody saves anything."""
    return isinstance(value, RaggedDTensor) and value.numel() == 0


class _Shared(NamedTuple):
    """What all ranks of a mesh have, for one in ``parts`` of them to save; this rank is in part ``own``."""

    mesh: DeviceMesh
    parts: int
    own: int


def _saving_ranks() -> set[int]:
    """The ranks that plan together with this one, in the ``torch.distributed.checkpoint.save`` that asks."""
    save = arguments_of_save(inspect.currentframe())
    if not save or save.get("no_dist") or not save.get("use_collectives", True):
        return set()
    return set(dist.get_process_group_ranks(save.get("process_group") or dist.group.WORLD))


def _left_to_others(held: Mapping[str, Any], saving: set[int]) -> set[str]:
    """Names of what another of the ``saving`` ranks saves, which has the same."""
    if not saving:
        return set()
    sizes: dict[_Shared, dict[str, int]] = defaultdict(dict)
    for name, shared, nbytes in _held_by_several(held):
        sizes[shared][name] = nbytes
    return {
        name
        for shared, of_names in sizes.items()
        if saving.issuperset(ranks_of(shared.mesh))
        for name, part in evenly(of_names, shared.parts).items()
        if part != shared.own
    }


def _held_by_several(held: Mapping[str, Any]) -> Iterator[tuple[str, _Shared, int]]:
    """Tensors of which replicas have the same pieces, with their bytes, and optimizers' counts of a sharded parameter's
    steps."""
    meshes: dict[str, DeviceMesh] = {}  # of what the parameters and states by a name begin with
    for name, value in held.items():
        if isinstance(value, RaggedDTensor):
            whole = value._spec.whole
            meshes[name.rpartition(".")[0]] = whole or value.device_mesh
            if whole is not None:
                yield name, _Shared(whole, whole.size(0), whole.get_local_rank(0)), value.numel() * value.itemsize
    by_all = {mesh: _shared_by_all(mesh) for mesh in set(meshes.values())}
    for name, value in held.items():
        of, _, last = name.rpartition(".")
        if last == "step" and of and of in meshes and not isinstance(value, RaggedDTensor):
            yield name, by_all[meshes[of]], 1


def _shared_by_all(mesh: DeviceMesh) -> _Shared:
    return _Shared(mesh, mesh.size(), ranks_of(mesh).index(dist.get_rank()))


def evenly(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Which part each name is of, so that parts are about as large as one another."""
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    part_of, _ = longest_first(range(len(names)), [sizes[name] for name in names], [0] * parts)
    return {names[i]: part for i, part in part_of.items()}


def _is_whole(stored: TensorStorageMetadata) -> bool:
    """Whether a tensor's pieces are runs of its elements, row-major, that follow one another from first to last."""
    end = 0
    for start, stop in sorted(_run(chunk, stored.size) for chunk in stored.chunks):
        if start != end:
            return False
        end = stop
    return end == math.prod(stored.size)


def _run(chunk: ChunkStorageMetadata, size: Sequence[int]) -> tuple[int, int]:
    """The first element of a box and the one after its last; an empty run before the tensor of one that is no run."""
    start, numel, stride, is_cut = 0, 1, 1, False
    for offset, length, whole in zip(reversed(chunk.offsets), reversed(chunk.sizes), reversed(size), strict=True):
        if offset < 0 or offset + length > whole or (is_cut and length != 1):
            return -1, -1
        is_cut = is_cut or length != whole
        start += offset * stride
        stride *= whole
        numel *= length
    return start, start + numel
