"""Messages between ranks on CPUs, over gloo: what collectives are made of where gloo's own copy too much."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from ..torch_internals.groups import group_beside

# Tags, each with a number that comes of all that this rank has exchanged before (see `tell_apart`). They must not meet
# others of the same process group, nor each other: ranks that came to different collectives wait until the process
# group's timeout, and don't take gradients for parameters, or one layer's for another's.
GATHER, REDUCTION, EXCHANGE = 0x63, 0x64, 0x65
CAME_TO_SOMETHING_ELSE = (
    "failed or left, took another number of steps, or came to something else (left out a layer or an expert, or took "
    "another branch)"
)
_NUMBERS = 1 << 24  # gloo's tags have 32 bits
_FACTOR = 1_000_003
_numbers: WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = WeakKeyDictionary()
_ways_back: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Message(NamedTuple):
    """What is sent to a rank, or where what it sends goes."""

    tensor: Tensor
    rank: int  # in the group


@dataclass(frozen=True)
class Exchange:
    """Messages in flight, each with the rank at its other end."""

    works: tuple[tuple[dist.Work, int], ...]

    def wait(self) -> None:
        """Returns when all have come, and what was sent may be written.

        Raises:
            RuntimeError: at the process group's timeout, or when a rank has gone.
        """
        for work, peer in self.works:
            with _naming(peer):
                work.wait()


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Says which rank is to blame for what gloo says of a connection."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"[rank {dist.get_rank()}] waited in vain for rank {peer}, which {CAME_TO_SOMETHING_ELSE}: {error}"
        ) from error


def tell_apart(group: dist.ProcessGroup, number: int) -> None:
    """Has ranks that are about to exchange messages of different buffers, or graphs, wait for each other in vain.

    Args:
        group: the ranks.
        number: of the buffer or the graph, alike on all of them.
    """
    numbers = _numbers.setdefault(group, Counter())
    for kind in (GATHER, REDUCTION, EXCHANGE):
        numbers[kind] = (numbers[kind] * _FACTOR + number) % _NUMBERS


def peers_of(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, each rank beginning with the one after it, so that no two rush to one."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def start_exchange(
    sent: Sequence[Message], received: Sequence[Message], group: dist.ProcessGroup, kind: int
) -> Exchange:
    """Sends and receives messages, none of which may be touched until the wait has returned.

    Args:
        sent: to other ranks.
        received: from other ranks, each of the bytes that its sender sends.
        group: the ranks. All of them exchange something at this point.
        kind: of the collective that the messages are of: :data:`GATHER`, :data:`REDUCTION` or :data:`EXCHANGE`.
    """
    number = _numbers.setdefault(group, Counter())
    number[kind] = (number[kind] + 1) % _NUMBERS
    tag = kind * _NUMBERS + number[kind]
    own = group.rank()
    ranks = dist.get_process_group_ranks(group)
    works: list[tuple[dist.Work | None, int]] = []
    for each, rank in received:
        way = _way(rank, own, group)
        with _naming(ranks[rank]):
            works.append((dist.irecv(each, group=way, tag=tag, group_src=rank), ranks[rank]))
    for each, rank in sent:
        way = _way(own, rank, group)
        with _naming(ranks[rank]):
            works.append((dist.isend(each, group=way, tag=tag, group_dst=rank), ranks[rank]))
    return Exchange(tuple((work, peer) for work, peer in works if work is not None))


def _way(sender: int, receiver: int, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group between two of whose ranks messages travel in one direction, as others do in the other direction.

    Gloo has one connection between two ranks of a group. It is locked while the computing thread writes megabytes to
    it, and if something comes meanwhile, gloo's own thread asks for it in vain again and again, on a core that others
    compute on. So what comes is on another connection than what goes.
    """
    return group if sender < receiver else _way_back(group)


def connect(group: dist.ProcessGroup) -> None:
    """Has the ranks of a group, which have all come here, open the connections that their exchanges take.

    Where nobody did, a first exchange does: there a rank that comes alone waits until the process group's timeout.
    """
    if group.size() > 1:
        _way_back(group)


def _way_back(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if group not in _ways_back:
        _ways_back[group] = group_beside(group)
    return _ways_back[group]
