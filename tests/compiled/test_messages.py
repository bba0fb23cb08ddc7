"""Messages between ranks over gloo: each direction has a connection of its own."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import vescale_compile as vc
from vescale_compile.runtime.messages import EXCHANGE, Message, peers_of, start_exchange, tell_apart
from vescale_compile.torch_internals import groups


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
    going = {call.kwargs["group_dst"]: call.kwargs["group"] for call in sends.call_args_list}
    coming = {call.kwargs["group_src"]: call.kwargs["group"] for call in receipts.call_args_list}
    assert going.keys() == coming.keys() == set(peers_of(dist.group.WORLD))
    assert all(going[rank] is not coming[rank] for rank in going)
    ways: list[list[bool]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ways, [going.get(rank) is dist.group.WORLD for rank in range(dist.get_world_size())])
    me = dist.get_rank()
    assert all(ways[rank][me] == (coming[rank] is dist.group.WORLD) for rank in coming)  # each is sent as expected


@on_ranks(2)
def test_a_group_of_an_earlier_ones_name_looks_elsewhere_for_addresses():
    """As where a process group is initialized again over a store that is still there."""
    with mock.patch.object(groups, "PrefixStore", wraps=dist.PrefixStore) as places:
        for _ in range(2):
            total = torch.ones(1)
            groups.group_beside(dist.group.WORLD).allreduce([total]).wait()
            assert total == 2
    first, second = (call.args[0] for call in places.call_args_list)
    assert first != second


@on_ranks(3)
def test_each_rank_gets_what_each_other_sent():
    assert exchange(dist.group.WORLD) == [-1.0 if rank == dist.get_rank() else rank for rank in range(3)]


@on_ranks(3)
def test_a_rank_that_does_not_come_is_named():
    group = dist.new_group([1, 2], timeout=timedelta(seconds=1))
    if dist.get_rank() in (1, 2):
        exchange(group)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"\[rank 1\] waited in vain for rank 2"):
            exchange(group)
    dist.barrier()


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


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])


@on_ranks(2)
def test_layers_that_share_compiled_code_are_not_taken_for_one_another():
    torch._dynamo.reset()
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = vc.fully_shard(Blocks(), mesh=DeviceMesh.from_group(group, "cpu"))
    x = torch.ones(2, 8)
    for layer in model.layers:
        layer.compile(backend="vescale", options={"lowering": "eager"})
        layer(x)
    with pytest.raises(RuntimeError, match=r"(?i)timed out|closed by peer"):
        model.layers[dist.get_rank()](x)


@on_ranks(3)
def test_ranks_that_call_one_group_by_different_names_understand_each_other():
    torch._dynamo.reset()
    rank = dist.get_rank()
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    if rank < 2:  # so that the second mesh is rank 1's second and rank 2's first of its shape
        vc.fully_shard(nn.Linear(8, 8), mesh=first)
    if rank > 0:
        torch.manual_seed(0)
        linear = nn.Linear(8, 8)
        x = torch.ones(2, 8)
        expected = linear(x)
        sharded = vc.fully_shard(linear, mesh=second)
        call = torch.compile(sharded, backend="vescale", options={"lowering": "eager"})
        assert torch.equal(call(x), expected)


@pytest.mark.parametrize("begun", ["isend", "irecv"])
@on_ranks(2)
def test_a_rank_that_has_gone_before_a_message_is_begun_is_named(begun: str):
    closed = RuntimeError("Connection closed by peer")
    other = 1 - dist.get_rank()
    with (
        mock.patch.object(dist, begun, side_effect=closed),
        pytest.raises(
            RuntimeError, match=rf"^\[rank \d\] waited in vain for rank {other}, .*Connection closed by peer"
        ),
    ):
        exchange(dist.group.WORLD)
