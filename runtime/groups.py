"""Process groups, by names that are equal on every rank of a mesh: so ranks compile equal graphs, and share them.

PyTorch's own names of the groups of a mesh with two dimensions differ from rank to rank, for each is in others.
"""

from __future__ import annotations

import itertools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals import resolve_group

_names: dict[str, str] = {}  # PyTorch's


def name_group(mesh: DeviceMesh, dim: int) -> str:
    """Names this rank's group along dimension ``dim`` of ``mesh``, for :func:`group_named`.

    The name rests on the mesh's shape, and on how many groups of others like it were named before: ranks that use
    their meshes in the same order have the same names, in the next process too. After one has failed to, names may
    differ: ranks then share less of what they compile.
    """
    group = mesh.get_group(dim).group_name
    for count in itertools.count():
        name = f"{mesh.device_type}_{'x'.join(map(str, mesh.shape))}_dim{dim}_{count}"
        if not _is_alive(_names.setdefault(name, group)):
            _names[name] = group
        if _names[name] == group:
            return name
    raise AssertionError("unreachable")


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that :func:`name_group` has named."""
    return resolve_group(_names[name])


def _is_alive(group: str) -> bool:
    """Whether it was not destroyed."""
    try:
        resolve_group(group)
    except RuntimeError:
        return False
    return True
