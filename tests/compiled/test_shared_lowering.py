"""Ranks of one host lower a graph once, and find it in Inductor's cache after that."""

import errno
import functools
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vescale_compile as vc
from vescale_compile.shared_lowering import _record_of, lowered_once
from vescale_compile.torch_internals.inductor import inductor_compile_inner

pytestmark = pytest.mark.slow  # left out of `make test-fast`


@pytest.fixture
def graph(tmp_path, monkeypatch) -> torch.fx.GraphModule:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return torch.fx.symbolic_trace(torch.nn.Linear(2, 2))


def held(graph: torch.fx.GraphModule) -> filelock.FileLock:
    """The lock of another process."""
    return filelock.FileLock(_record_of(graph, [], "").with_suffix(".lock"))


class Unheard(nn.Module):
    """A model that no cache holds: a number of this run is part of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))
        number = torch.tensor([random.SystemRandom().random()], dtype=torch.float64)
        dist.broadcast(number, 0)
        self.number = number.item()

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.number).sum()


def misses_and_hits(mesh: DeviceMesh | None = None) -> list[int]:
    """Of all ranks together, in Inductor's cache, by a model that it has not seen: a forward and a backward."""
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(Unheard), mesh=mesh)
    counters.clear()
    torch.compile(model, backend="vescale")(torch.ones(7)).backward()
    counted = torch.tensor([counters["inductor"][f"fxgraph_cache_{what}"] for what in ("miss", "hit")])
    dist.all_reduce(counted)
    return counted.tolist()


@on_ranks(2)
def test_two_ranks_lower_each_graph_once():
    assert misses_and_hits() == [2, 2]


@on_ranks(4)
def test_replicas_lower_each_graph_once_though_their_groups_are_others():
    assert misses_and_hits(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))) == [2, 6]


def test_a_process_that_is_lowering_is_waited_for_four_times_the_deadline(graph):
    start = time.monotonic()
    with held(graph), lowered_once(graph, [], "", deadline=0.2) as waited:
        assert time.monotonic() - start >= waited >= 0.8


def lower_slowly(folder: Path, *args: Any, **kwargs: Any) -> Any:
    """In seven seconds, or twice as long beside another rank; at once where that has lowered it."""
    finished = folder / "finished"
    if not finished.exists():
        begun = len(list(folder.iterdir()))
        (folder / str(dist.get_rank())).touch()
        time.sleep(7 * (1 + begun))
    code = inductor_compile_inner(*args, **kwargs)
    finished.touch()
    return code


@on_ranks(2)
def test_ranks_agree_on_a_graph_that_takes_longer_to_lower_than_the_deadline(tmp_path):
    torch._dynamo.reset()
    model = torch.compile(vc.fully_shard(models.build(Unheard)), backend="vescale", options={"deadline": 6})
    lower = functools.partial(lower_slowly, tmp_path)
    given = mock.patch("vescale_compile.backend._MOST_TIMES_AS_LONG", 0)  # the deadline, and no more
    with mock.patch("vescale_compile.backend.inductor_compile_inner", lower), given, torch.no_grad():
        assert model(torch.ones(7)).isfinite()


def test_on_gpus_nobody_is_waited_for(graph):
    inputs = [torch.empty(2, device="meta")]
    lock = filelock.FileLock(_record_of(graph, inputs, "").with_suffix(".lock"))
    start = time.monotonic()
    with lock, lowered_once(graph, inputs, "", deadline=60):
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_a_graph_is_lowered_where_files_can_not_be_locked_and_a_warning_says_so_once(graph, monkeypatch, caplog, error):
    monkeypatch.setattr(filelock.FileLock, "acquire", mock.Mock(side_effect=error))
    for version in ("a", "b"):
        with lowered_once(graph, [], version, deadline=60):
            pass
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("vescale_compile")]
    assert "can't be locked" in message and str(error) in message


def test_nobody_is_waited_for_once_the_graph_has_been_lowered(graph):
    with lowered_once(graph, [], "", deadline=60):
        pass
    start = time.monotonic()
    with held(graph), lowered_once(graph, [], "", deadline=60):
        assert time.monotonic() - start < 30


def test_a_graph_that_could_not_be_lowered_counts_as_one_that_was_not(graph):
    with pytest.raises(RuntimeError, match="no compiler"), lowered_once(graph, [], "", deadline=60):
        raise RuntimeError("no compiler")
    assert not _record_of(graph, [], "").exists()
    with held(graph).acquire(timeout=0):
        pass


def test_graphs_of_other_devices_are_other_graphs(graph):
    here, there = (_record_of(graph, [torch.empty(2, device=device)], "") for device in ("cpu", "meta"))
    assert here != there
