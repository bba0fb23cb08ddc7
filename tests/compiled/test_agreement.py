"""How ranks meet over the store, wait, and decide together."""

import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import initialize_again, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vescale_compile as vc
from vescale_compile.runtime import agreement, messages
from vescale_compile.runtime.agreement import (
    RanksDisagree,
    RanksMissing,
    agree,
    agree_on_buffers,
    agree_on_graph,
    tell_of_failure,
)
from vescale_compile.runtime.decisions import Trial, _first_posted, first_decides
from vescale_compile.runtime.life import Life, life
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`

ODD = 1  # the rank that others wait for


@on_ranks(2)
def test_ranks_that_have_agreed_open_connections_for_nothing_later():
    """One that alone takes another way, uncompiled, say, would wait for those that don't come to open theirs."""
    model = vc.fully_shard(nn.Linear(4, 2), mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
    agree_on_buffers(buffers_in(model))
    with mock.patch.object(messages, "group_beside", side_effect=AssertionError):
        model(torch.ones(1, 4)).sum().backward()


@on_ranks(2)
def test_a_rank_that_does_not_come_is_named_at_the_deadline():
    mesh, late = init_device_mesh("cpu", (2,)), dist.get_rank() == ODD
    if late:
        dist.barrier()
    with pytest.raises(RanksMissing, match=r"no answer from rank 1 within 0\.5 s"):
        agree(mesh, "test", [], deadline_s=0.5)
    if not late:
        dist.barrier()


@on_ranks(2)
def test_without_a_deadline_ranks_are_waited_for_as_long_as_for_a_collective():
    late = dist.get_rank() == ODD
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=0.5)), "cpu")
    if late:
        dist.barrier()
    with pytest.raises(RanksMissing, match=r"no answer from rank 1 within 0\.5 s.*init_process_group\(timeout"):
        agree(mesh, "test", [])
    if not late:
        dist.barrier()


@on_ranks(2)
def test_ranks_meet_over_a_store_that_wakes_nobody_where_a_value_is_compared_and_set():
    """As TCPStore does without libuv: they would sleep until the deadline, though all have come."""
    mesh, posted = init_device_mesh("cpu", (2,)), agreement.default_store()
    if first := dist.get_rank() == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=False)
        posted.set("port without libuv", str(store.port))
    else:
        store = dist.TCPStore("localhost", int(posted.get("port without libuv")), use_libuv=False)
    with (
        mock.patch.object(agreement, "default_store", return_value=store),
        mock.patch.object(agreement, "_GRACE_S", 0.0),
        mock.patch.object(agreement._Exchange, "_give_up", side_effect=AssertionError),
    ):
        time.sleep(0.3 if first else 0.0)
        agree(mesh, "test", [], deadline_s=3)
    dist.barrier()  # the store is the first rank's


@on_ranks(3)
def test_a_rank_that_gives_up_does_so_for_those_that_come_later():
    """Else they would agree, and wait for it in their first collective."""
    mesh, late = init_device_mesh("cpu", (3,)), dist.get_rank() != ODD
    if late:
        dist.barrier()
    with (
        mock.patch.object(agreement, "_GRACE_S", 0.0),
        pytest.raises(RanksMissing, match=r"no answer from ranks 0, 2 within 0\.5 s"),
    ):
        agree(mesh, "test", [], deadline_s=30 if late else 0.5)
    if not late:
        dist.barrier()


@on_ranks(3)
def test_one_rank_alone_asks_who_is_missing():
    """Of thousands, all of whom may have waited in vain for the first."""
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    store = agreement.default_store()
    if rank > 0:
        seen = mock.Mock(wraps=store)
        with (
            mock.patch.object(agreement, "default_store", return_value=seen),
            mock.patch.object(agreement, "_GRACE_S", 0.5),
            pytest.raises(RanksMissing, match=r"no answer from rank 0 within 0\.5 s"),
        ):
            agree(mesh, "test", [], deadline_s=0.5)
        store.add("asked", int(seen.check.called))
        store.set(f"counted {rank}", "")
    store.wait(["counted 1", "counted 2"])
    assert store.add("asked", 0) == 1


@on_ranks(3)
def test_what_the_first_rank_decides_holds_for_all_and_for_those_that_come_later():
    mesh = init_device_mesh("cpu", (3,))
    decide = first_decides(mesh)
    rank = dist.get_rank()
    if rank == 1:
        assert decide("which order", "mine") == "mine"
    dist.barrier()
    if rank == 2:
        assert decide("which order", "another") == "mine"
        assert decide("another graph's order", "another") == "another"


@on_ranks(2)
def test_what_a_trial_decides_holds_in_it_alone_on_all_ranks():
    mesh, trial, rank = init_device_mesh("cpu", (2,)), Trial(), dist.get_rank()
    decide = trial.first_decides(mesh)
    if rank == 0:
        assert decide("which order", "mine") == "mine"
    dist.barrier()
    if rank == 1:
        assert decide("which order", "another") == "mine"
        assert first_decides(mesh)("which order", "the real one") == "the real one"


def test_of_two_ranks_that_decide_at_once_one_has_decided_for_both():
    store = dist.HashStore()
    assert _first_posted(store, "key", "one") == "one"
    with mock.patch.object(dist.HashStore, "check", return_value=False):
        assert _first_posted(store, "key", "another") == "one"


def test_what_a_rank_would_have_decided_itself_is_not_sent_to_it():
    store = dist.HashStore()
    _first_posted(store, "key", "long")
    with mock.patch.object(dist.HashStore, "get", side_effect=AssertionError):
        assert _first_posted(store, "key", "long") == "long"


@on_ranks(2)
def test_what_was_decided_for_training_holds_in_a_trial():
    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank() == 0:
        first_decides(mesh)("which order", "the real one")
    dist.barrier()
    assert Trial().first_decides(mesh)("which order", "another") == "the real one"


@on_ranks(2)
def test_a_process_group_that_is_initialized_again_begins_anew(tmp_path):
    if dist.get_rank() == ODD:
        life().next_exchange(init_device_mesh("cpu", (2,)))  # as if it had waited in vain for another one
    initialize_again(tmp_path / "store")
    agree(init_device_mesh("cpu", (2,)), "both come", [], deadline_s=10)


@on_ranks(2)
def test_what_an_earlier_process_group_left_in_the_store_is_not_read():
    mesh = init_device_mesh("cpu", (2,))
    keys = []
    for _ in range(2):
        keys.append(Life().next_exchange(mesh))
        dist.barrier()
    assert len(set(keys)) == 2


@on_ranks(2)
def test_meshes_of_the_same_ranks_agree_again_after_one_has_failed():
    meshes = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    buffers = [buffers_in(vc.fully_shard(nn.Linear(4, 2), mesh=mesh))[0] for mesh in meshes]
    if dist.get_rank() == ODD:
        tell_of_failure(buffers, MemoryError("no room"))
    else:
        with pytest.raises(RanksDisagree, match=r"compiled graph: rank 1 failed to compile: MemoryError: no room$"):
            agree_on_graph(buffers, ["one"], deadline_s=5)
    agree_on_graph(buffers, ["another"], deadline_s=5)


@on_ranks(4)
def test_ranks_of_another_mesh_hear_of_those_that_do_not_agree_in_theirs():
    """Ranks 0 and 2 are one mesh, 1 and 3 another, and all are one besides."""
    pairs, everyone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "other")), init_device_mesh("cpu", (4,))
    for make, check in (
        (lambda: nn.Linear(4, 2), lambda buffers: agree_on_graph(buffers, [f"{dist.get_rank() == 2}"], deadline_s=5)),
        (lambda: nn.Linear(4, 2 + (dist.get_rank() == 2)), lambda buffers: agree_on_buffers(buffers, deadline_s=5)),
    ):
        buffers = [
            buffers_in(vc.fully_shard(made, mesh=mesh))[0]
            for made, mesh in ((make(), pairs["pair"]), (nn.Linear(4, 2), everyone))
        ]
        with pytest.raises(RanksDisagree):
            check(buffers)
        agree(everyone, "test", [], deadline_s=5)


@on_ranks(4)
def test_ranks_of_another_mesh_hear_which_rank_can_not_compile():
    pairs, everyone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "other")), init_device_mesh("cpu", (4,))
    buffers = [buffers_in(vc.fully_shard(nn.Linear(4, 2), mesh=mesh))[0] for mesh in (pairs["pair"], everyone)]
    if dist.get_rank() == 2:
        tell_of_failure(buffers, MemoryError("no room"))
    else:
        with pytest.raises(RanksDisagree, match=r"compiled graph: rank 2 failed to compile: MemoryError: no room$"):
            agree_on_graph(buffers, ["these"], deadline_s=5)
    agree(everyone, "test", [], deadline_s=5)
