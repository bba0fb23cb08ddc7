"""What ranks have in common from the initialization of a process group to its end, and where they post it."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals.groups import apart_from_earlier


@dataclass(eq=False)
class Life:
    """What ranks have in common since the default process group was initialized: they may be others the next time.

    Attributes:
        graphs: meshes, by name, and the collectives of graphs that they have agreed on.
        gradients: by a unit's layout, of agreed graphs, the parameters that they read and that were frozen, and those
            that they compute gradients for.
        answers: by question, what a rank has decided alone.
    """

    graphs: set[tuple[str, ...]] = field(default_factory=set)
    gradients: dict[str, set[tuple[frozenset[int], frozenset[int]]]] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    _prefixes: dict[str, str] = field(default_factory=dict)
    _exchanges: Counter[str] = field(default_factory=Counter)

    def prefix(self, mesh: DeviceMesh) -> str:
        """Of the keys under which the ranks of a mesh post."""
        name = name_of(mesh)
        if name not in self._prefixes:
            self._prefixes[name] = apart_from_earlier(f"vescale/{name}", mesh.size())
        return self._prefixes[name]

    def next_exchange(self, mesh: DeviceMesh) -> str:
        prefix = self.prefix(mesh)
        self._exchanges[prefix] += 1
        return f"{prefix}/{self._exchanges[prefix]}"


_lives: WeakKeyDictionary[dist.ProcessGroup, Life] = WeakKeyDictionary()


def life() -> Life:
    """That of the default process group.

    Raises:
        RuntimeError: there is none.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(
            "a sharded model is called without a process group: call torch.distributed.init_process_group"
        )
    if (found := _lives.get(world)) is None:  # asked for often, each unit's forward
        found = _lives[world] = Life()
    return found


def nobody_to_ask(mesh: DeviceMesh) -> bool:
    """Whether a mesh has no ranks but this one that are there."""
    return mesh.size() == 1 or dist.get_backend() == "fake"


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """All ranks of a mesh, of whom each of its process groups may have some only."""
    return sorted(mesh.mesh.flatten().tolist())


def name_of(mesh: DeviceMesh) -> str:
    """The same on all ranks of the mesh, as no name of its process groups is."""
    return hashlib.sha256(repr(ranks_of(mesh)).encode()).hexdigest()[:16]
