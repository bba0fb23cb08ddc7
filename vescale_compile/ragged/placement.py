"""RaggedShard: the placement that cuts a tensor into contiguous, unequal runs of whole blocks.

The idea is veScale-FSDP's (arXiv 2602.22437): a rank's share is counted in units that quantizers and matrix
optimizers need whole, and ranks may hold different numbers of units, or none.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

_MOST_WRITTEN = 16  # ranks, or runs of them, that a placement in a message lists


class RaggedShardError(NotImplementedError):
    """An operation that would need elements which this rank does not hold."""


@dataclass(frozen=True, init=False, repr=False)
class RaggedShard(Placement):
    """A tensor, flattened row-major, dealt out in rank order in whole units.

    Args:
        dims: the leading dimensions ``(0, ..., i-1)`` that may be cut. With ``()`` the tensor is one unit,
            and one rank holds it.
        local_units: how many units each rank of the (one-dimensional) mesh holds; zeros are allowed.

    For a tensor of `numel` elements the unit is ``numel / sum(local_units)`` elements, and must be a whole
    number of the sub-tensors that `dims` leave uncut. The local tensor of a rank is contiguous and
    one-dimensional.

    Raises:
        ValueError: `dims` is no prefix, or `local_units` is empty, negative, or all zero.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        super().__init__()
        dims, local_units = tuple(dims), tuple(local_units)
        if dims != tuple(range(len(dims))):
            raise ValueError(f"RaggedShard dims must be a prefix (0, 1, ..., i-1) of the dimensions, got {dims}")
        if min(local_units, default=0) < 0 or not any(local_units):
            raise ValueError(
                f"RaggedShard local_units must be one non-negative count for each rank, not all zero, got {local_units}"
            )
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "local_units", local_units)
        # Thousands of ranks: DTensor's caches and Dynamo's guards hash placements often.
        object.__setattr__(self, "_hash", hash((RaggedShard, dims, local_units)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        """Of many ranks, those that follow one another with as many units together: 3 * 7 is three ranks of seven."""
        if len(self.local_units) <= _MOST_WRITTEN:
            return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"
        runs = [(len(list(run)), units) for units, run in itertools.groupby(self.local_units)]
        written = ", ".join(f"{count} * {units}" for count, units in runs[:_MOST_WRITTEN])
        rest = "" if len(runs) <= _MOST_WRITTEN else f", {sum(count for count, _ in runs[_MOST_WRITTEN:])} more ranks"
        return f"RaggedShard(dims={self.dims}, local_units=({written}{rest}))"

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.dims, self.local_units)

    def unit_numel(self, shape: Sequence[int]) -> int:
        """The number of elements in one unit of a tensor of `shape`.

        Raises:
            ValueError: a tensor of `shape` can't be cut this way.
        """
        total = self._holders[1][-1]
        numel = math.prod(shape)
        if len(self.dims) > len(shape):
            raise ValueError(f"{self} cuts {len(self.dims)} dimensions, the tensor of shape {tuple(shape)} has fewer")
        if numel % total:
            raise ValueError(
                f"{self} has {total} units, which do not divide the {numel} elements of shape {tuple(shape)}"
            )
        unit, uncut = numel // total, math.prod(shape[len(self.dims) :])
        if numel and unit % uncut:
            raise ValueError(
                f"{self} makes units of {unit} elements for shape {tuple(shape)}; a unit must be a multiple "
                f"of {uncut} elements, the size of the dimensions outside dims={self.dims}"
            )
        return unit

    def viewed(self, shape: Sequence[int], other: Sequence[int]) -> RaggedShard:
        """That of a tensor of `shape` seen in the shape `other`: of the same runs, in as few dimensions as that allows.

        Raises:
            ValueError: a tensor of `shape` can't be cut this way.
        """
        unit = self.unit_numel(shape)
        fewest = next(dims for dims in range(len(other) + 1) if unit % max(math.prod(other[dims:]), 1) == 0)
        if fewest == len(self.dims):
            return self
        if fewest not in self._views:  # to check and hash one takes a look at each of maybe thousands of ranks
            self._views[fewest] = RaggedShard(range(fewest), self.local_units)
        return self._views[fewest]

    def intervals(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Each rank's ``(start, stop)`` in the row-major flattened tensor of `shape`, in rank order.

        Raises:
            ValueError: a tensor of `shape` can't be cut this way.
        """
        unit = self.unit_numel(shape)
        stops = itertools.accumulate((units * unit for units in self.local_units), initial=0)
        return tuple(itertools.pairwise(stops))

    def held(self, shape: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Of :meth:`intervals` those that are not empty, by rank: few, where many ranks share many parameters.

        Raises:
            ValueError: a tensor of `shape` can't be cut this way.
        """
        unit = self.unit_numel(shape)
        ranks, firsts = self._holders
        return dict(zip(ranks, itertools.pairwise(first * unit for first in firsts), strict=True)) if unit else {}

    def interval(self, shape: Sequence[int], rank: int) -> tuple[int, int]:
        """One rank's of :meth:`intervals`, without the others', which are many where ranks are.

        Raises:
            ValueError: a tensor of `shape` can't be cut this way.
        """
        unit = self.unit_numel(shape)
        ranks, firsts = self._holders
        return firsts[bisect_left(ranks, rank)] * unit, firsts[bisect_right(ranks, rank)] * unit

    def counts(self, shape: Sequence[int], start: int, stop: int) -> list[int]:
        """How many of a run of elements each rank holds: of those from `start` to `stop`, of which there are some.

        Raises:
            ValueError: a tensor of `shape` can't be cut this way.
        """
        unit = self.unit_numel(shape)
        ranks, firsts = self._holders
        counts = [0] * len(self.local_units)
        for at in range(bisect_right(firsts, start // unit) - 1, bisect_left(firsts, -(-stop // unit))):
            counts[ranks[at]] = min(stop, firsts[at + 1] * unit) - max(start, firsts[at] * unit)
        return counts

    @functools.cached_property
    def _holders(self) -> tuple[array[int], array[int]]:
        """The ranks that hold units, in order, and the first unit of each; after the last, how many units there are.

        Arrays, which are small: in all of a model there may be millions.
        """
        ranks = itertools.compress(itertools.count(), self.local_units)
        firsts = itertools.accumulate(filter(None, self.local_units), initial=0)
        return array("q", ranks), array("q", firsts)

    @functools.cached_property
    def _views(self) -> dict[int, RaggedShard]:
        return {}


def check_layout(device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> RaggedShard:
    """The placement, if mesh, placement and global shape fit each other; ValueError if not."""
    if device_mesh.ndim != 1:
        raise ValueError(f"RaggedShard needs a one-dimensional mesh, got {device_mesh}; index it by dimension name")
    if device_mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not part of {device_mesh}")
    if len(placements) != 1 or not isinstance(placements[0], RaggedShard):
        raise ValueError(f"a RaggedDTensor has one RaggedShard placement, got {tuple(placements)}")
    placement = placements[0]
    if len(placement.local_units) != device_mesh.size():
        raise ValueError(
            f"rank {device_mesh.get_local_rank()}: {placement} counts units for "
            f"{len(placement.local_units)} ranks, the mesh has {device_mesh.size()}"
        )
    placement.unit_numel(shape)
    return placement


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
