"""What the planner is told about a tensor: its shape, the size of an element, and what may not be cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from vescale_compile.planner.layout import Item


@dataclass(frozen=True, slots=True)
class Elements:
    """Blocks of ``count`` consecutive elements in row-major order, counted from the tensor's start.

    Raises:
        TypeError: ``count`` is no int.
        ValueError: it is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self, self.count)


@dataclass(frozen=True, slots=True)
class Rows:
    """Blocks of ``count`` consecutive rows, counted from the tensor's start.

    A row is one line of the last dimension: a tensor of shape ``(..., R, C)`` is read as a matrix of
    ``numel / C`` rows of C elements. A stack of experts ``(E, R, C)`` thus has E * R rows, and where R is no
    multiple of ``count`` a block may hold the last rows of one expert and the first of the next. A 1-D
    tensor has rows of one element. A tile of h x w elements in a row-major matrix is kept whole by
    ``Rows(h)``, whatever w is.

    Raises:
        TypeError: ``count`` is no int.
        ValueError: it is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self, self.count)


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole tensor is one block: it lives on one rank."""


Granularity = Elements | Rows | Whole


def combine(granularities: Iterable[Granularity | None], shape: Sequence[int]) -> Granularity | None:
    """The finest granularity of a tensor of ``shape`` that cuts no block of any of the given ones.

    Blocks are counted from the tensor's start, so those whose size is the least common multiple fit all. ``None``
    asks for nothing, and ``Whole`` for everything.

    Raises:
        TypeError: a granularity that is none of ``Elements``, ``Rows``, ``Whole`` and ``None``.
    """
    blocks = []
    for each in granularities:
        match each:
            case None:
                continue
            case Whole():
                return each
            case Elements() | Rows():
                blocks.append(each)
            case _:
                raise _not_a_granularity(each)
    if not blocks:
        return None
    row = shape[-1] if len(shape) > 1 else 1
    numel = math.lcm(*(each.count * (row if isinstance(each, Rows) else 1) for each in blocks))
    return Rows(numel // row) if any(isinstance(each, Rows) for each in blocks) else Elements(numel)


def _check_count(granularity: Elements | Rows, count: int) -> None:
    kind = type(granularity).__name__
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{kind}({count!r}): the size of a block is an int, not {type(count).__name__}")
    if count < 1:
        raise ValueError(f"{kind}({count}): the size of a block must be at least 1")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to place.

    Args:
        name: unique in its unit.
        shape: sizes, outermost first, row-major and contiguous.
        itemsize: bytes of one element.
        granularity: the smallest piece that may not be cut; ``None`` cuts anywhere.

    Raises:
        ValueError: a negative size, no elements at all, or an itemsize below 1.
        TypeError: a granularity that is none of ``Elements``, ``Rows``, ``Whole`` and ``None``.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    granularity: Granularity | None = None
    item: Item = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple:
            object.__setattr__(self, "shape", tuple(self.shape))
        if self.itemsize < 1:
            raise ValueError(f"tensor {self.name!r}: itemsize is {self.itemsize} bytes; it must be at least 1")
        try:
            item = _item(self.shape, self.granularity)
        except (TypeError, ValueError) as error:
            raise type(error)(f"tensor {self.name!r}: {error}") from None
        object.__setattr__(self, "item", item)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.item.numel

    @property
    def block_numel(self) -> int:
        """Elements of one block, at most ``numel``; the tensor's last block may be shorter."""
        return self.item.block

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """The dimensions that ``RaggedShard`` cuts: the prefix outside which a block is whole."""
        match self.granularity:
            case Whole():
                return ()
            case Rows() if len(self.shape) > 1:
                return tuple(range(len(self.shape) - 1))
            case _:
                return tuple(range(len(self.shape)))


@lru_cache(maxsize=4096)
def _item(shape: tuple[int, ...], granularity: Granularity | None) -> Item:
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {shape} has a negative size")
    numel = math.prod(shape)
    if numel == 0:
        raise ValueError(f"shape {shape} has no elements; leave the tensor out of the plan")
    match granularity:
        case None:
            block = 1
        case Whole():
            block = numel
        case Elements(count):
            block = count
        case Rows(count):
            block = count * (shape[-1] if len(shape) > 1 else 1)
        case _:
            raise _not_a_granularity(granularity)
    return Item(numel, min(block, numel))


def _not_a_granularity(value: object) -> TypeError:
    return TypeError(f"granularity is {value!r}; give Elements(n), Rows(n), Whole() or None")
