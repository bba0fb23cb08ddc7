"""Process groups, by names that are equal on every rank of a mesh: so ranks compile equal graphs, and share them.

PyTorch's own names of the groups of a mesh with two dimensions differ from rank to rank, for each is in others.
"""

from __future__ import annotations

import itertools
from weakref import ReferenceType, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals.groups import resolve_group

_named: dict[str, ReferenceType[dist.ProcessGroup]] = {}


def name_group(mesh: DeviceMesh, dim: int) -> str:
    """Names this rank's group along dimension ``dim`` of ``mesh``, for :func:`group_named`.

    The name rests on the mesh's shape, and on how many groups of others like it were named before: ranks that use
    their meshes in the same order have the same names, in the next process too. After one has failed to, names may
    differ: ranks then share less of what they compile.
    """
    group = mesh.get_group(dim)
    for count in itertools.count():
        name = f"{mesh.device_type}_{'x'.join(map(str, mesh.shape))}_dim{dim}_{count}"
        if _alive(name) is None:
            _named[name] = ref(group)
        if _alive(name) is group:
            return name
    raise AssertionError("unreachable")


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that :func:`name_group` has named.

    Raises:
        RuntimeError: it was destroyed.
    """
    group = _alive(name)
    if group is None:
        raise RuntimeError(
            f"the process group {name} of a sharded model was destroyed. After init_process_group build the model "
            "anew, and load what it has learned from a checkpoint"
        )
    return group


def stride_of(group: dist.ProcessGroup) -> int:
    """How many ranks each of a group comes after the one before; of a group of uneven strides, the first."""
    first, *others = dist.get_process_group_ranks(group)
    return abs(others[0] - first) if others else 1


def _alive(name: str) -> dist.ProcessGroup | None:
    """The group of that name, if it was not destroyed. PyTorch gives its own name to others after that."""
    group = _named[name]() if name in _named else None
    if group is None:
        return None
    try:
        return group if resolve_group(group.group_name) is group else None
    except RuntimeError:
        return None
