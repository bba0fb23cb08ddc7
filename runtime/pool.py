"""Static memory for communication: slots that all compiled graphs of a process share.

Graphs run one after another, and what a slot holds never outlives the graph that filled it. So a graph's first slot of
a dtype is every graph's first: as large as the largest that a living graph asked for. Slots are allocated when a
graph is first called, all of its slots together, and freed with the last graph that uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class SlotSpec(NamedTuple):
    """What a graph wants of a slot."""

    numel: int
    dtype: torch.dtype
    device: torch.device


class _Memory:
    """A slot's memory; grows when a graph comes that wants more."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def take(self, spec: SlotSpec) -> Tensor:
        if self.tensor is None or self.tensor.numel() < spec.numel:
            self.tensor = None  # freed before its successor is allocated
            with torch.inference_mode(False):  # the next graph may train
                self.tensor = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        return self.tensor.narrow(0, 0, spec.numel)


_memories: WeakValueDictionary[tuple[torch.dtype, torch.device, int], _Memory] = WeakValueDictionary()


def with_slots(run: Callable[[list[Any]], Any], specs: Sequence[SlotSpec]) -> Callable[[list[Any]], Any]:
    """A boxed function that calls ``run``, another, with the slots ``specs`` after its own arguments."""
    memories = _reserve(specs)

    def call(args: list[Any]) -> Any:
        args.extend(memory.take(spec) for memory, spec in zip(memories, specs, strict=True))
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _reserve(specs: Sequence[SlotSpec]) -> list[_Memory]:
    taken: Counter[tuple[torch.dtype, torch.device]] = Counter()
    memories = []
    for spec in specs:
        kind = (spec.dtype, spec.device)
        memories.append(_memories.setdefault((*kind, taken[kind]), _Memory()))
        taken[kind] += 1
    return memories
