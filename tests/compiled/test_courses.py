"""Layers that are compiled one by one, by the program or because of graph breaks: a graph launches the first gather of
the next, and waits for none of the last one's reductions."""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.report import GraphReport
from vescale_compile.runtime import arrivals, courses, ops, pool, writes
from vescale_compile.runtime.life import life
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`


@functools.lru_cache(maxsize=1)
def backend_for(*kind: object, budget: int | None) -> tuple[Callable[..., object], list[GraphReport]]:
    """One, or layers share no code, and the reports of the graphs that it compiles. What it has compiled for a model,
    others of that kind run too, until there is one of another kind."""
    torch._dynamo.reset()
    graphs: list[GraphReport] = []
    options = {"lowering": "eager", "cluster": models.SLOW_WIRE, "memory_budget": budget}
    return functools.partial(vescale, options=options, on_compiled=graphs.append), graphs


def sharded(
    build: models.Model = models.deep,
    budget: int | None = None,
    whole: bool = False,
    kept: tuple[int, ...] = (),
    **shard_options: object,
) -> tuple[nn.Module, list[GraphReport]]:
    """A sharded model whose layers are compiled one by one, or the ``whole``, and the reports of their graphs. If some
    are ``kept`` for the backward, the others are not."""
    model = models.build(build)
    for i, layer in enumerate(model.layers if kept else ()):
        vc.fully_shard(layer, reshard_after_forward=i not in kept)
    vc.fully_shard(model, **shard_options)
    backend, graphs = backend_for(dist.group.WORLD, build, whole, kept, *shard_options.items(), budget=budget)
    for module in [model] if whole else model.layers:
        module.compile(backend=backend, dynamic=False)
    return model, graphs


CHECKPOINTED = functools.partial(models.CheckpointedLayers, models.DEEP, reentrant=False)


def data_of(*lengths: int) -> list[models.Batch]:
    return [models.batches(1, 11, shape=(2, length))[0] for length in lengths]


@contextmanager
def logged(model: nn.Module) -> Iterator[list[str]]:
    """What happens to the layers' graphs and units meanwhile."""
    log: list[str] = []
    layers = {buffer.shard.data_ptr(): f"{i}" for i, layer in enumerate(model.layers) for buffer in buffers_in(layer)}
    enter, start, leave, wait = courses.Course.enter, ops._start_all_gather, arrivals.leave, arrivals.Arrival.wait

    def entered(course: courses.Course, graph: pool.GraphSlots) -> int:
        log.append("graph")
        return enter(course, graph)

    def started(shard: Tensor, full: Tensor, group: dist.ProcessGroup) -> ops.Pending:
        if shard.data_ptr() in layers:
            log.append(f"gather {layers[shard.data_ptr()]}")
        return start(shard, full, group)

    def left(result: Tensor, uses: tuple[Tensor, ...], finish: Callable[[], object]) -> None:
        log.append("leave")
        leave(result, uses, finish)

    def waited(arrival: arrivals.Arrival) -> None:
        if not arrival.over:
            log.append("wait")
        wait(arrival)

    with (
        mock.patch.object(courses.Course, "enter", entered),
        mock.patch.object(ops, "_start_all_gather", started),
        mock.patch("vescale_compile.runtime.leaving.leave", left),
        mock.patch.object(arrivals.Arrival, "wait", waited),
    ):
        yield log


def known(build: models.Model = models.deep, **options: bool) -> tuple[nn.Module, models.Batch]:
    """A model that has taken two steps, and a batch."""
    model, _ = sharded(build, **options)
    batch = data_of(12)[0]
    models.train(model, model.parameters(), [batch] * 2)
    return model, batch


class Noted(NamedTuple):
    """What a forward and its backward do: see `logged`. And how often anything was copied in either."""

    forward: list[str]
    backward: list[str]
    copied: int


@functools.cache
def noted(build: models.Model = models.deep, **options: bool) -> Noted:
    """Of a step of a model that is known."""
    model, batch = known(build, **options)
    with (
        mock.patch.object(Tensor, "clone", autospec=True, side_effect=Tensor.clone) as clone,
        mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as copy,
    ):
        with logged(model) as forward:
            loss = model(*batch)
        with logged(model) as backward:
            loss.backward()
    return Noted(forward, backward, clone.call_count + copy.call_count)


@functools.cache
def losses_of_four_steps() -> list[float]:
    """Of which `known` takes the first two, with the same batch."""
    model, _ = sharded()
    return models.train(model, model.parameters(), data_of(12) * 4)


class Broken(models.Uneven):
    def __init__(self) -> None:
        super().__init__(models.DEEP)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("build", "options"),
    [(models.deep, {}), (models.deep, {"reshard_after_forward": False}), (Broken, {"whole": True})],
    ids=["one_by_one", "kept", "broken"],
)
@on_ranks(2)
def test_each_graph_of_a_forward_launches_the_first_gather_of_the_next(build, options):
    assert noted(build, **options).forward == [
        *("graph", "gather 0", "gather 1"),
        *("graph", "gather 2"),
        *("graph", "gather 3"),
        "graph",
    ]


@on_ranks(2)
def test_so_does_each_of_a_backward_while_what_the_last_one_reduces_is_in_flight():
    assert noted().backward == [
        *("graph", "gather 3", "gather 2", "leave"),
        *("graph", "gather 1", "leave"),
        *("graph", "wait", "gather 0", "leave"),
        *("graph", "wait", "leave"),
    ]


def trains_as_unsharded(build: models.Model, data: list[models.Batch], **options: object) -> None:
    model, _ = sharded(build, **options)
    losses = models.train(model, model.parameters(), data)
    unsharded, reference = models.train_unsharded(build, data)
    assert losses == pytest.approx(reference, rel=1e-6)
    assert models.largest_difference(model, unsharded) < 1e-6


class TwoKinds(models.Uneven):
    """Layers of two sizes by turns."""

    def __init__(self) -> None:
        super().__init__(models.DEEP)
        for i in (1, 3):
            self.layers[i] = nn.Sequential(nn.Linear(13, 90), nn.Tanh(), nn.Linear(90, 13))


class Wandering(models.Uneven):
    """Goes through its layers in an order that depends on the batch."""

    ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 0, 1, 2))

    def __init__(self) -> None:
        super().__init__(models.DEEP)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in self.ORDERS[tokens.shape[1] % len(self.ORDERS)]:
            x = self.layers[i](x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("build", [models.deep, Wandering], ids=["layers", "wandering"])
@on_ranks(2)
def test_numbers_are_those_of_the_unsharded_model(build):
    trains_as_unsharded(build, data_of(12, 12, 12, 11, 10, 12, 9, 9))


REENTRANT = functools.partial(models.CheckpointedLayers, models.DEEP, reentrant=True)


@pytest.mark.parametrize(
    ("build", "lengths"),
    [(CHECKPOINTED, (12, 12, 12, 11, 12, 11)), (REENTRANT, (12, 12, 12, 12)), (TwoKinds, (12, 12, 12, 12))],
    ids=["checkpointed", "reentrant", "two_kinds"],
)
@on_ranks(2)
def test_so_they_are_with_layers_that_run_again_or_are_of_two_kinds(build, lengths):
    trains_as_unsharded(build, data_of(*lengths))


@on_ranks(2)
def test_so_they_are_where_parameters_are_kept_for_the_backward():
    trains_as_unsharded(models.deep, data_of(12, 12, 11, 12), reshard_after_forward=False)


@on_ranks(2)
def test_so_they_are_where_a_graph_that_gathers_nothing_writes_to_slots_before_the_one_that_was_gathered_for():
    trains_as_unsharded(TwoKinds, data_of(12, 12, 12, 12), kept=(1, 3))


@on_ranks(4)
def test_so_they_are_over_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    trains_as_unsharded(models.deep, data_of(12, 12, 12), mesh=mesh)


@on_ranks(2)
def test_so_they_are_with_quantized_gathers():
    model, _ = sharded(quantize=vc.BlockInt8(block=8))
    uncompiled = vc.fully_shard(models.build(models.deep), quantize=vc.BlockInt8(block=8))
    data = data_of(12, 12, 12)
    losses = models.train(model, model.parameters(), data)
    assert losses == pytest.approx(models.train(uncompiled, uncompiled.parameters(), data), rel=1e-6)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_so_they_are_where_one_rank_compiles_a_layer_again(reshard):
    """Its slots are then other graphs'."""
    backend_for.cache_clear()
    lengths = [(12, 12), (12, 12), (12, 11), (12, 12)]
    own = data_of(*(each[dist.get_rank()] for each in lengths))
    trains_as_unsharded(models.deep, own, reshard_after_forward=reshard)


@pytest.mark.parametrize(("build", "reshard"), [(models.deep, True), (models.deep, False), (CHECKPOINTED, False)])
@on_ranks(2)
def test_what_is_gathered_ahead_is_copied_nowhere(build, reshard):
    assert noted(build, **({} if reshard else {"reshard_after_forward": False})).copied == 0


@on_ranks(2)
def test_what_is_written_between_two_forwards_is_what_the_second_reads():
    model, batch = known()
    with torch.no_grad():
        for factor in (0.5, 2.0, 0.25):
            for param in model.parameters():
                param.mul_(factor)
            unsharded = models.build(models.deep)
            weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            unsharded.load_state_dict(weights)
            assert model(*batch).item() == pytest.approx(unsharded(*batch).item(), rel=1e-6)


WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "method": lambda to, of: to.copy_(of),
    "data": lambda to, of: to.data.copy_(of),
    "detached": lambda to, of: to.detach().copy_(of),
    "row": lambda to, of: to[:].copy_(of),
    "view": lambda to, of: to.view(-1).copy_(of.view(-1)),
    "foreach": lambda to, of: torch._foreach_copy_([to], [of]),
}


def write_own_elements(to: Tensor, of: Tensor) -> None:
    to.to_local().copy_(of.to_local())


class Following(models.Uneven):
    """Half of its layers take the weights of the other half, in the middle of the forward."""

    how = "method"

    def __init__(self) -> None:
        super().__init__(models.DEEP)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for leader in self.layers[:2]:
            x = leader(x)
        with torch.no_grad():
            for follows, leads in zip(self.layers[2:].parameters(), self.layers[:2].parameters(), strict=True):
                WAYS.get(self.how, write_own_elements)(follows, leads)
        for follower in self.layers[2:]:
            x = follower(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@on_ranks(2)
def test_what_a_forward_writes_is_what_the_layers_after_it_read():
    model, batch = known(Following)
    losses = {}
    for model.how in WAYS:
        losses[model.how] = models.train(model, model.parameters(), [batch])
    _, expected = models.train_unsharded(Following, [batch] * (2 + len(WAYS)))
    assert losses == {how: pytest.approx([loss], rel=1e-6) for how, loss in zip(WAYS, expected[2:], strict=True)}


def test_what_a_forward_writes_to_a_rank_s_own_elements_is_refused():
    """Others may have written to none."""
    with fake_world(2), torch.no_grad():
        model, _ = sharded(Following)
        model.how = "own elements"
        (batch,) = data_of(12)
        model(*batch)
        with pytest.raises(RuntimeError, match=r"\[rank 0\] what to_local\(\) gives .* was written to"):
            model(*batch)
        assert not writes._watching


class Twice(models.Uneven):
    """Goes forward and backward inside of its forward, and forward again."""

    def __init__(self) -> None:
        super().__init__(models.DEEP)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        super().forward(tokens, labels).backward()
        return super().forward(tokens, labels)


@on_ranks(2)
def test_a_forward_that_goes_on_after_a_backward_waits_for_what_that_reduces():
    """Of which some is reduced out of slots of the same turn."""
    model, batch = known(Twice)
    with logged(model) as log:
        model(*batch)
    again = [i for i, each in enumerate(log) if each == "graph"][2 * models.DEEP]
    before = log[:again].count("leave") - log[:again].count("wait")
    assert before > 0
    assert log[again:][: before + 2] == ["graph", *["wait"] * before, "gather 0"]


@on_ranks(2)
def test_a_layer_that_a_model_has_no_more_is_not_gathered_on_a_rank_that_still_has_it():
    model, _ = sharded()
    batch = data_of(12)[0]
    with torch.no_grad():
        for _ in range(2):
            model(*batch)
        removed = model.layers.pop(2)
        if dist.get_rank() == 0:
            del removed
            gc.collect()
        unsharded = models.build(models.deep)
        del unsharded.layers[2]
        assert model(*batch).item() == pytest.approx(unsharded(*batch).item(), rel=1e-6)


def test_what_a_former_process_group_has_left_is_not_waited_for():
    with fake_world(2):
        model, batch = known()
        model(*batch).backward()
        left = set(arrivals._arrivals.values())
    assert left
    with fake_world(2), mock.patch.object(arrivals.Arrival, "wait", autospec=True) as wait:
        known()
    assert wait.called
    assert left.isdisjoint(call.args[0] for call in wait.call_args_list)


@on_ranks(2)
def test_after_a_forward_and_a_backward_that_raised_training_goes_on():
    """What they have launched is waited for, and not taken for something else."""
    expected = losses_of_four_steps()[2:]
    model, batch = known()

    def fail(*_: object) -> None:
        raise ValueError("of the program")

    hooks = model.layers[2].register_forward_hook, model.layers[1].register_full_backward_pre_hook
    for register in hooks:
        hook = register(fail)
        with pytest.raises(ValueError, match="of the program"):
            model(*batch).backward()
        hook.remove()
    model.zero_grad()
    assert models.train(model, model.parameters(), [batch] * 2) == expected


@on_ranks(2)
def test_a_rank_alone_may_be_profiled():
    expected = losses_of_four_steps()[2:]
    model, batch = known()
    profiler = torch.profiler.profile() if dist.get_rank() == 0 else contextlib.nullcontext()
    with profiler:
        losses = models.train(model, model.parameters(), [batch] * 2)
    assert losses == expected


@on_ranks(2)
def test_models_may_take_turns():
    """As a student and its teacher do, whose layers are as large."""
    *_, third, fourth = losses_of_four_steps()
    (student, _), (teacher, _), (batch,) = sharded(), sharded(), data_of(12)
    for model in (student, teacher):
        models.train(model, model.parameters(), [batch] * 2)
    for loss in (third, fourth):
        with torch.no_grad():
            assert teacher(*batch).item() == third
        assert models.train(student, student.parameters(), [batch]) == [loss]


@on_ranks(2)
def test_what_is_remembered_of_copies_of_shards_goes_with_them():
    """The program's hooks give the backward others in each step, as those of ``save_on_cpu`` do."""
    model, batch = known()
    remembered = []
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.detach):
            model(*batch).backward()
        remembered.append(len(courses._routes[life()]))
    assert remembered == remembered[:1] * 3


@on_ranks(2)
def test_the_slots_of_both_turns_are_planned_and_freed_with_the_graphs():
    torch._dynamo.reset()
    backend_for.cache_clear()
    gc.collect()
    before = dict(pool._memories)
    model, graphs = sharded()
    for _ in range(2):
        model(*data_of(12)[0]).backward()
    own = [memory.tensor.nbytes for key, memory in pool._memories.items() if key not in before]
    assert sum(own) == graphs[0].slot_bytes > 0
    del model
    torch._dynamo.reset()
    gc.collect()
    assert dict(pool._memories) == before


def test_a_budget_is_for_the_slots_of_both_turns():
    with fake_world(2):
        model, _ = sharded(budget=100)
        with pytest.raises(Exception, match="Give at least") as refused:
            model(*models.batches(1, 11)[0])
        least = int(re.search(r"Give at least (\d+)", str(refused.value))[1])
        for budget in (least, least + 300):
            model, graphs = sharded(budget=budget)
            model(*models.batches(1, 11)[0]).backward()
            assert graphs[0].planned_bytes <= budget
