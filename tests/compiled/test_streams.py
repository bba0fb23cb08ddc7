"""Collectives on a GPU: which stream runs what, and which waits for which. A GPU's streams are played by a record."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from vescale_compile.runtime import arrivals, collectives, eager, pool
from vescale_compile.runtime.streams import Reached
from vescale_compile.runtime.writes import Watch


class Streams:
    """In place of PyTorch's: takes down what happens, in the order in which a process asks for it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.create("compute")

    def create(self, name: str = "communication") -> "Stream":
        number = sum(line.startswith(f"new {name}") for line in self.log)
        self.log.append(f"new {name}{number}")
        return Stream(f"{name}{number}", self)

    def run(self, what: str) -> None:
        self.log.append(f"{self.current.name}: {what}")


class Stream:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self.log, self._streams = name, streams.log, streams

    def __enter__(self) -> None:
        self._before, self._streams.current = self._streams.current, self

    def __exit__(self, *_: object) -> None:
        self._streams.current = self._before

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> "Event":
        return Event(f"all of {self.name} up to line {len(self.log)}")

    def wait_event(self, event: "Event") -> None:
        self.log.append(f"{self.name} waits for {event.what}")


@dataclass
class Event:
    what: str
    over: bool = False

    def query(self) -> bool:
        return self.over


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Of two ranks in a process group that averages, as NCCL's do."""
    streams = Streams()
    monkeypatch.setattr(collectives, "_streams", {})
    monkeypatch.setattr(torch, "Stream", lambda device, priority: streams.create())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams.current)
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(collectives, name, lambda *_, name=name, **__: streams.run(name))
    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **__: streams.run(name))
    monkeypatch.setattr(torch.Tensor, "record_stream", _refused)
    with fake_world(2), FakeTensorMode():
        yield streams


def _refused(*_: object) -> None:
    raise AssertionError("PyTorch's allocator would keep the memory until the stream's work is seen to be over")


def memory(numel: int) -> torch.Tensor:
    return torch.empty(numel, device="cuda")


def test_a_gather_waits_for_what_was_computed_before_it_and_only_its_wait_holds_up_computation(gpu: Streams) -> None:
    pending = collectives.start_all_gather(memory(4), memory(8), dist.group.WORLD)
    gpu.run("computes")
    pending.wait()
    gpu.run("reads")
    assert gpu.log[1:] == [
        "new communication0",
        "communication0 waits for compute0",
        "communication0: all_gather_single",
        "compute0: computes",
        "compute0 waits for all of communication0 up to line 4",
        "compute0: reads",
    ]


def test_a_graph_follows_the_one_before_it_that_ran_on_another_stream(
    gpu: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_last_use", {})
    spec = pool.SlotSpec(8, torch.float32, torch.device("cuda"))
    first, second = (pool.StepSlots().add(lambda args, name=name: gpu.run(name), [spec]) for name in ("one", "two"))
    side = gpu.create("side")
    with side:
        first([])
        first([])
    second([])
    second([])
    assert gpu.log[2:] == [
        "side0: one",
        "side0: one",
        "compute0 waits for all of side0 up to line 4",
        "compute0: two",
        "compute0: two",
    ]


def test_what_a_graph_that_raises_has_launched_is_over_before_anything_that_comes_next(
    gpu: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what nobody knows of, such as a gather before an allocation that failed."""
    monkeypatch.setattr(pool, "_last_use", {})

    def fail(args: list[torch.Tensor]) -> None:
        collectives.start_all_gather(memory(4), args[0], dist.group.WORLD)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        pool.StepSlots().add(fail, [pool.SlotSpec(8, torch.float32, torch.device("cuda", 0))])([])
    assert gpu.log[-2:] == ["communication0: all_gather_single", "compute0 waits for communication0"]


def test_a_graph_is_not_recorded_in_a_cuda_graph(gpu: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graph = pool.StepSlots().add(lambda args: gpu.run("one"), [pool.SlotSpec(8, torch.float32, torch.device("cuda"))])
    with pytest.raises(RuntimeError, match=r"\[rank 0\] .*while a CUDA graph is recorded.*leave out torch.cuda.graph"):
        graph([])
    assert gpu.log == ["new compute0"]


def test_memory_that_grows_is_given_back_to_a_stream_that_comes_after_all_who_used_it(
    gpu: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_last_use", {})
    device = torch.device("cuda")
    small, large = (
        pool.StepSlots().add(lambda args, name=name: gpu.run(name), [pool.SlotSpec(numel, torch.float32, device)])
        for name, numel in (("small", 8), ("large", 16))
    )
    side = gpu.create("side")
    with side:
        small([])
    small([])
    large([])
    assert gpu.log[2:] == [
        "side0: small",
        "compute0 waits for all of side0 up to line 3",
        "compute0: small",
        "side0 waits for compute0",
        "compute0: large",
    ]


def test_gathers_share_a_stream_and_reductions_another(gpu: Streams) -> None:
    for _ in range(2):
        collectives.start_all_gather(memory(4), memory(8), dist.group.WORLD)
        collectives.start_reduce_scatter(memory(8), memory(4), memory(0), dist.group.WORLD)
    collectives.start_all_to_all(memory(8), memory(8), dist.group.WORLD)
    assert [line for line in gpu.log if "single" in line] == [
        "communication0: all_gather_single",
        "communication1: reduce_scatter_single",
        "communication0: all_gather_single",
        "communication1: reduce_scatter_single",
        "communication1: all_to_all_single",
    ]


def test_the_average_over_replicas_follows_its_reduction_on_another_stream_and_the_next_reduction_does_not_wait(
    gpu: Streams,
) -> None:
    first, second = (
        collectives.start_reduce_scatter(memory(8), memory(4), memory(0), dist.group.WORLD, dist.group.WORLD)
        for _ in range(2)
    )
    first.wait()
    second.wait()
    assert [line for line in gpu.log[1:] if not line.startswith("new")] == [
        "communication0 waits for compute0",
        "communication0: reduce_scatter_single",
        "communication1 waits for compute0",
        "communication1 waits for all of communication0 up to line 4",
        "communication1: all_reduce",
        "communication0 waits for compute0",
        "communication0: reduce_scatter_single",
        "communication1 waits for compute0",
        "communication1 waits for all of communication0 up to line 10",
        "communication1: all_reduce",
        "compute0 waits for all of communication1 up to line 8",
        "compute0 waits for all of communication1 up to line 13",
    ]


def test_what_one_stream_has_gathered_uncompiled_another_waits_for_before_it_reads_it(
    gpu: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And PyTorch's allocator hears of it: autograd frees what was gathered when a backward is done with it."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, reader: gpu.log.append(f"kept for {reader.name}"))
    gpu.run("gathers")
    param = memory(4)
    gathered = eager._Gathered((), (param,), 0, 0, Reached.by_now(param.device), Watch([]))
    gathered.on_this_stream()
    with gpu.create("side"):
        gathered.on_this_stream()
    assert gpu.log[1:] == [
        "compute0: gathers",
        "new side0",
        "side0 waits for all of compute0 up to line 2",
        "kept for side0",
    ]


def test_which_parameters_other_ranks_used_is_asked_behind_reductions_and_not_waited_for_without_need(
    gpu: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = functools.partial(torch.tensor, pin_memory=False)
    monkeypatch.setattr(torch, "tensor", lambda *args, pin_memory, **options: tensor(*args, **options))
    monkeypatch.setattr(torch.Tensor, "to", lambda values, device, non_blocking: memory(values.numel()))
    collectives.start_reduce_scatter(memory(8), memory(4), memory(0), dist.group.WORLD)
    monkeypatch.setattr(FakeTensor, "tolist", lambda _: [gpu.run("reads")])
    answer = collectives.start_asking([True, False], memory(0).device, [dist.group.WORLD])
    gpu.run("computes")
    answer()
    assert gpu.log[1:] == [
        "new communication0",
        "communication0 waits for compute0",
        "communication0: reduce_scatter_single",
        "communication0 waits for compute0",
        "communication0: all_reduce",
        "compute0: computes",
        "compute0 waits for all of communication0 up to line 6",
        "compute0: reads",
    ]


def left(gpu: Streams) -> arrivals.Arrival:
    """What a reduction on the current stream writes."""
    arrival = arrivals.Arrival(0, (memory(4), torch.empty(8)), lambda: None, gpu.current)
    arrivals._arrivals[1] = arrival
    return arrival


def test_what_was_left_in_flight_is_freed_when_its_stream_has_waited_for_it(gpu: Streams) -> None:
    arrival = left(gpu)
    arrivals.settle()
    assert not arrivals._kept and not arrival.held


@pytest.mark.parametrize("on", ["its own", "another"])
def test_slots_of_the_last_backward_are_freed_when_its_gradients_are_read_on_its_stream(gpu: Streams, on: str) -> None:
    arrival = left(gpu)
    with gpu.current if on == "its own" else gpu.create("another"):
        arrival.wait()
    assert bool(arrival.held) is (on == "another")
    assert arrival.uses  # another stream that is about to write there still waits
    arrivals.forget()


def test_where_freed_gradients_were_others_are_reduced_into_and_a_graph_on_another_stream_waits_for_both(
    gpu: Streams,
) -> None:
    result = memory(4)
    for name in ("first", "second"):
        arrivals.leave(result, (torch.empty(8),), functools.partial(gpu.run, name))
        arrivals.arrival_of(result).wait()
    with gpu.create("another"):
        arrivals.settle()
    arrivals.forget()
    assert gpu.log[1:] == [
        "compute0: first",
        "compute0: second",
        "new another0",
        "another0 waits for all of compute0 up to line 2",
        "another0 waits for all of compute0 up to line 3",
    ]


def test_of_reductions_that_fail_the_first_is_raised_when_none_is_left() -> None:
    def fail(number: int) -> None:
        raise RuntimeError(f"reduction {number}")

    for number in range(3):
        finish = functools.partial(fail, number)
        arrivals._arrivals[number] = arrivals.Arrival(number, (torch.empty(1),), finish, None)
    with pytest.raises(RuntimeError, match="reduction 0"):
        arrivals.settle()
    assert not arrivals._arrivals
    arrivals.settle()


@pytest.mark.parametrize("through", [True, False])
def test_where_another_stream_has_waited_it_is_freed_when_that_is_through_or_the_first_waits_too(
    gpu: Streams, through: bool
) -> None:
    """PyTorch's allocator would give its memory to the first stream at once."""
    arrival = left(gpu)
    another = gpu.create("another")
    with another:
        arrivals.settle()
        assert arrivals._kept == [arrival] and arrival.held
        arrival._done.over = through
    with another if through else gpu.current:
        arrivals.settle()
    assert not arrivals._kept and not arrival.held
    assert gpu.log[-1].startswith("compute0 waits for all of another0") != through
