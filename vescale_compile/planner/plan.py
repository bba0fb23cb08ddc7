"""The planner's answer: buffers, each with every tensor's offset, every rank's share and the padding."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter

from vescale_compile.planner.bound import Items, shard_lower_bound, split_lower_bound
from vescale_compile.planner.drawing import draw_buffer
from vescale_compile.planner.layout import Item, Layout
from vescale_compile.planner.spec import TensorSpec


@dataclass(frozen=True)
class BufferPlan:
    """One buffer of ``world_size`` equal shards and the tensors in it.

    Args:
        tensors: the tensors, in the order in which they lie in the buffer.
        layout: their places; it has checked itself. Plans of equal content share it.
        lower_bound: no layout of these tensors in one buffer (in this order, if the order was to be kept) has
            fewer elements for each rank: proven.

    Raises:
        ValueError: the layout is not one of these tensors, or their itemsizes differ.
    """

    tensors: tuple[TensorSpec, ...]
    layout: Layout
    lower_bound: int

    def __post_init__(self) -> None:
        if tuple(map(attrgetter("item"), self.tensors)) != self.layout.items:
            raise ValueError("the layout's items are not those of the tensors, in their order")
        if len(set(map(attrgetter("itemsize"), self.tensors))) != 1:
            raise ValueError("a buffer holds tensors of one itemsize")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.tensors[0].itemsize

    @property
    def shard_numel(self) -> int:
        """S: elements of each rank, padding included, the same on every rank."""
        return self.layout.shard_numel

    @property
    def shard_bytes(self) -> int:
        """The same in bytes."""
        return self.shard_numel * self.itemsize

    @cached_property
    def offsets(self) -> dict[str, int]:
        """First element of each tensor in the buffer of ``world_size * shard_numel`` elements."""
        return {tensor.name: start for tensor, start in zip(self.tensors, self.layout.starts, strict=True)}

    @cached_property
    def numel(self) -> int:
        """Elements of the tensors."""
        return sum(item.numel for item in self.layout.items)

    @property
    def padding_numel(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.world_size * self.shard_numel - self.numel

    @property
    def padding_percent(self) -> float:
        """Padding in per cent of the tensors' elements."""
        return 100 * self.padding_numel / self.numel

    @property
    def gap_percent(self) -> float:
        """How far S lies above its proven lower bound, in per cent of the bound; 0 means optimal."""
        return 100 * (self.shard_numel / self.lower_bound - 1)

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {tensor.name: tensor for tensor in self.tensors}

    def _find(self, name: str) -> TensorSpec:
        if name not in self._by_name:
            raise KeyError(f"no tensor {name!r} in this buffer; it holds {', '.join(self._by_name)}")
        return self._by_name[name]

    def interval(self, name: str, rank: int) -> tuple[int, int]:
        """The elements [start, end) of tensor ``name`` that ``rank`` holds, counted in the flattened tensor.

        An empty share is (n, n). In the rank's shard they begin at element
        ``max(offsets[name] - rank * shard_numel, 0)``.

        Raises:
            KeyError: no such tensor in this buffer.
            ValueError: no such rank.
        """
        tensor = self._find(name)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} of tensor {name!r}: ranks are 0 to {self.world_size - 1}")
        low = rank * self.shard_numel - self.offsets[name]
        start = min(max(low, 0), tensor.numel)
        return start, min(max(low + self.shard_numel, 0), tensor.numel)

    def ragged_shard(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """``(dims, local_units)`` of the ``RaggedShard`` placement that this layout gives tensor ``name``.

        A unit is a block where the blocks divide the tensor evenly, and otherwise the largest size that
        divides both: no rank's share needs a finer one.
        """
        tensor = self._find(name)
        unit = math.gcd(tensor.block_numel, tensor.numel)
        shares = _shares(self.offsets[name], tensor.numel, self.shard_numel, self.world_size, unit)
        return tensor.ragged_dims, shares

    def __str__(self) -> str:
        return draw_buffer(self)


@dataclass(frozen=True)
class UnitPlan:
    """The buffers of one unit, whose tensors are gathered, and their gradients reduced, at the same time.

    Args:
        buffers: at least one; more where dtypes differ or where blocks that do not suit one another would
            inflate a common shard.
    """

    buffers: tuple[BufferPlan, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for buffer in self.buffers for tensor in buffer.tensors]
        if len(set(names)) < len(names):
            repeated = next(name for name, times in Counter(names).items() if times > 1)
            raise ValueError(f"tensor {repeated!r} is given more than once; names in a unit are unique")

    @property
    def numel(self) -> int:
        """Elements of the tensors, over all buffers."""
        return sum(buffer.numel for buffer in self.buffers)

    @property
    def shard_numel(self) -> int:
        """Elements of each rank, over all buffers."""
        return sum(buffer.shard_numel for buffer in self.buffers)

    @property
    def lower_bound(self) -> int:
        """Sum of the buffers' proven bounds: what this split could reach at best."""
        return sum(buffer.lower_bound for buffer in self.buffers)

    @property
    def joint_lower_bound(self) -> int:
        """Proven bound on the elements of each rank without a split: one buffer for each itemsize."""
        return self._bound(shard_lower_bound)

    @property
    def split_lower_bound(self) -> int:
        """Proven bound on the elements of each rank in any number of buffers."""
        return self._bound(split_lower_bound)

    def _bound(self, prove: Callable[[Items, int, int], int]) -> int:
        joint: dict[tuple[int, int, int], Counter[Item]] = {}
        for buffer in self.buffers:
            key = (buffer.itemsize, buffer.world_size, buffer.layout.alignment)
            joint.setdefault(key, Counter()).update(buffer.layout.items)
        return sum(prove(items, world, alignment) for (_, world, alignment), items in joint.items())

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no tensor, over all buffers."""
        return sum(buffer.padding_numel for buffer in self.buffers)

    @property
    def padding_percent(self) -> float:
        """Padding in per cent of the tensors' elements."""
        return 100 * self.padding_numel / self.numel

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.buffers))


@lru_cache(maxsize=4096)
def _shares(start: int, numel: int, shard: int, world_size: int, unit: int) -> tuple[int, ...]:
    """Units of a tensor on each rank. Cached: alike layers share one tuple of as many counts as there are ranks."""
    first, last = start // shard, (start + numel - 1) // shard
    if first == last:
        shares = [numel]
    else:
        shares = [(first + 1) * shard - start, *[shard] * (last - first - 1), start + numel - last * shard]
    return (*[0] * first, *(share // unit for share in shares), *[0] * (world_size - last - 1))
