"""Where the matrices of sharded parameters lie, which rank computes each, and in which exchange it travels."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..balance import choose_roots

# Fewer leave little to overlap: the first exchange out and the last one back have no computation beside them.
_LEAST_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a matrix's elements, row-major, that one rank of the group holds."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a parameter.

    Attributes:
        param: index of the parameter.
        start: the matrix's first element in the flattened parameter.
        shape: rows and columns.
        parts: who holds it, in the order of ranks, without gaps.
        stacked: whether the parameter is a stack of matrices.
    """

    param: int
    start: int
    shape: tuple[int, int]
    parts: tuple[Part, ...]
    stacked: bool

    def part_on(self, rank: int) -> Part | None:
        """What a rank holds of it; of thousands of ranks, so not by looking at each."""
        place = bisect.bisect_left(self.parts, rank, key=attrgetter("rank"))
        return self.parts[place] if place < len(self.parts) and self.parts[place].rank == rank else None


@dataclass(frozen=True)
class MatrixPlan:
    """Equal on every rank of the group.

    Attributes:
        matrices: all of them.
        roots: for each, the rank that computes it.
        chunks: indices of the matrices that are exchanged together, in the order of exchanges. A matrix in none of
            them is whole on its root.
    """

    matrices: tuple[Matrix, ...]
    roots: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    def whole_on(self, rank: int) -> list[int]:
        """The matrices that ``rank`` holds and computes alone."""
        exchanged = {i for chunk in self.chunks for i in chunk}
        return [i for i, root in enumerate(self.roots) if root == rank and i not in exchanged]


def matrices_of(param: int, shape: Sequence[int], held: Mapping[int, tuple[int, int]]) -> Iterator[Matrix]:
    """The matrices of a parameter of shape [m, n] or [matrices, m, n].

    Args:
        param: the parameter's index.
        shape: global.
        held: ``(start, stop)`` of the flattened parameter by the ranks that hold some, as ``RaggedShard.held`` gives.
    """
    rows, columns = shape[-2:]
    numel = rows * columns
    parts: list[list[Part]] = [[] for _ in range(math.prod(shape[:-2]))]
    for rank, (start, stop) in held.items():
        for i in range(start // numel, -(-stop // numel)):
            first = i * numel
            parts[i].append(Part(rank, max(start - first, 0), min(stop - first, numel)))
    for i, of_matrix in enumerate(parts):
        yield Matrix(param, i * numel, (rows, columns), tuple(of_matrix), len(shape) > 2)


def plan_matrices(matrices: Sequence[Matrix], costs: Sequence[int], world_size: int, *, chunk_numel: int) -> MatrixPlan:
    """Chooses roots and packs exchanges.

    A matrix of a stack that is whole on its rank is computed there. The others are balanced by cost over the ranks.

    Args:
        matrices: of parameters that are sharded over one group.
        costs: of computing each.
        world_size: number of ranks of the group.
        chunk_numel: elements that one rank receives in one exchange, about.
    """
    pinned = [m.parts[0].rank if m.stacked and len(m.parts) == 1 else None for m in matrices]
    held = [{part.rank: part.stop - part.start for part in m.parts} for m in matrices]
    roots = choose_roots(costs, held, world_size, pinned=pinned)
    exchanged = [i for i, m in enumerate(matrices) if any(part.rank != roots[i] for part in m.parts)]
    return MatrixPlan(tuple(matrices), tuple(roots), _chunks(exchanged, matrices, costs, roots, chunk_numel))


def _chunks(
    exchanged: Sequence[int], matrices: Sequence[Matrix], costs: Sequence[int], roots: Sequence[int], chunk_numel: int
) -> tuple[tuple[int, ...], ...]:
    """Every root's matrices, in order, in as many chunks, of about equal cost for each root.

    So all ranks compute equally long between two exchanges.
    """
    if not exchanged:
        return ()
    by_root: dict[int, list[int]] = {}
    for i in exchanged:
        by_root.setdefault(roots[i], []).append(i)
    numel = max(
        sum(part.stop - part.start for i in members for part in matrices[i].parts if part.rank != root)
        for root, members in by_root.items()
    )
    count = min(max(_LEAST_CHUNKS, -(-numel // chunk_numel)), max(map(len, by_root.values())))
    chunks: list[list[int]] = [[] for _ in range(count)]
    for members in by_root.values():
        total, before = sum(costs[i] for i in members), 0
        for i in members:
            middle = 2 * before + costs[i]
            chunks[count * middle // (2 * total)].append(i)
            before += costs[i]
    return tuple(tuple(sorted(chunk)) for chunk in chunks if chunk)
