"""Messages between ranks over gloo: each direction has a connection of its own."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from vescale_compile.runtime.messages import EXCHANGE, Message, peers_of, start_exchange, tell_apart


def exchange(group: dist.ProcessGroup) -> list[float]:
    """Sends this rank's number to every other, and returns what has come, by rank."""
    own, received = torch.tensor([float(group.rank())]), torch.full((group.size(), 1), -1.0)
    peers = peers_of(group)
    sent = [Message(own, rank) for rank in peers]
    start_exchange(sent, [Message(received[rank], rank) for rank in peers], group, EXCHANGE).wait()
    return received.flatten().tolist()


@on_ranks(2, 3)
def test_what_comes_from_a_rank_is_on_another_connection_than_what_goes_there():
    with (
        mock.patch.object(dist, "isend", wraps=dist.isend) as sends,
        mock.patch.object(dist, "irecv", wraps=dist.irecv) as receipts,
    ):
        exchange(dist.group.WORLD)
    going = {call.args[1]: call.args[2] for call in sends.call_args_list}
    coming = {call.args[1]: call.args[2] for call in receipts.call_args_list}
    assert going.keys() == coming.keys() == set(peers_of(dist.group.WORLD))
    assert all(going[rank] is not coming[rank] for rank in going)
    ways: list[list[bool]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ways, [going.get(rank) is dist.group.WORLD for rank in range(dist.get_world_size())])
    me = dist.get_rank()
    assert all(ways[rank][me] == (coming[rank] is dist.group.WORLD) for rank in coming)  # each is sent as expected


@on_ranks(3)
def test_each_rank_gets_what_each_other_sent():
    assert exchange(dist.group.WORLD) == [-1.0 if rank == dist.get_rank() else rank for rank in range(3)]


@on_ranks(3)
def test_ranks_of_a_group_are_counted_within_it():
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        assert exchange(group) == ([-1.0, 1.0] if group.rank() == 0 else [0.0, -1.0])


@on_ranks(2)
def test_both_directions_end_at_the_timeout_of_the_group():
    group = dist.new_group(timeout=timedelta(seconds=1))
    exchange(group)
    tell_apart(group, dist.get_rank())
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        exchange(group)
