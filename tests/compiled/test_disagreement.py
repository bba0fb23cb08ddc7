"""A rank whose model differs is named on every rank, before the first step, within a deadline."""

import functools
import time
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from ranks import initialize_again, on_ranks
from torch import nn
from torch._dynamo.exc import RestartAnalysis
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vescale_compile as vc
from vescale_compile import backend
from vescale_compile.compiled import others_hear_of_failures
from vescale_compile.runtime import agreement
from vescale_compile.runtime.agreement import RanksMissing, agree
from vescale_compile.runtime.collectives import start_all_gather, start_reduce_scatter
from vescale_compile.runtime.crossing import forget_carried
from vescale_compile.sharded_module import buffers_in

pytestmark = pytest.mark.slow  # left out of `make test-fast`

ODD = 1  # the rank that differs


class Wider(models.Uneven):
    """One block has another width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up, self.layers[1].down = nn.Linear(13, 9), nn.Linear(9, 13, bias=False)


class Swapped(models.Uneven):
    """Two parameters are registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        up = self.layers[0].up
        del self.layers[0].up
        self.layers[0].up = up


class FrozenPart(models.Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)


class Longer(models.Uneven):
    def __init__(self) -> None:
        super().__init__(layers=3)


class Shorter(models.Uneven):
    def __init__(self) -> None:
        super().__init__(layers=1)


DIFFERENCES = {
    Wider: r"'parameter layers\.1\.down\.weight: shape \(13, 9\), .* rank 0 has '.*down\.weight: shape \(13, 7\)",
    Swapped: r"'place of layers\.0\.\S+: \d+ in unit layers\.0' where rank 0 has 'place of layers\.0\.",
    FrozenPart: r"'parameter head\.bias: .*=False' where rank 0 has 'parameter head\.bias: .*=True",
    Longer: r"'parameter layers\.2\.\S+: .*' where rank 0 has 'nothing'",
    Shorter: r"'nothing' where rank 0 has 'parameter layers\.1\.",
}


@pytest.mark.parametrize(
    ("odd", "compile"),
    [(Wider, "eager"), (Shorter, "eager"), *((odd, None) for odd in DIFFERENCES)],
    ids=lambda value: getattr(value, "__name__", value),
)
@on_ranks(3)
def test_a_rank_with_another_model_is_named_on_every_rank_with_the_first_difference(odd, compile):
    torch._dynamo.reset()
    build = odd if dist.get_rank() == ODD else models.Uneven
    began = time.monotonic()
    _, call = models.sharded(build, compile=compile)
    message = f"rank 1 differs from the others: rank 1 has {DIFFERENCES[odd]}"
    with pytest.raises(Exception, match=message) as caught:
        call(*models.batches(1, 11)[0])
    assert f"[rank {dist.get_rank()}]" in str(caught.value)
    assert time.monotonic() - began < 60


@on_ranks(2)
def test_freezing_after_sharding_on_one_rank_is_found():
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven)
    if dist.get_rank() == ODD:
        model.get_parameter("head.bias").requires_grad_(False)
    with pytest.raises(Exception, match="rank 1 differs from the others"):
        call(*models.batches(1, 11)[0])


@on_ranks(2)
def test_another_policy_on_one_rank_is_found():
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(models.Uneven), reshard_after_forward=dist.get_rank() == ODD)
    call = torch.compile(model, backend="vescale", options={"lowering": "eager"})
    with pytest.raises(Exception, match=r"rank 1 differs .*reshard_after_forward=True"):
        call(*models.batches(1, 11)[0])


@on_ranks(2)
def test_another_option_on_one_rank_is_found():
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(models.Uneven))
    budget = {"memory_budget": "1GB"} if dist.get_rank() == ODD else {}
    call = torch.compile(model, backend="vescale", options={"lowering": "eager", **budget})
    with pytest.raises(Exception, match=r"rank 1 has .*memory_budget=1000000000 bytes.* rank 0 has .*=None"):
        call(*models.batches(1, 11)[0])


@on_ranks(2)
def test_a_rank_whose_model_has_no_memory_yet_is_named_on_every_rank():
    model = vc.fully_shard(models.build(models.Uneven))
    if dist.get_rank() == ODD:
        model.to("meta")
    with pytest.raises(Exception, match=r"rank 1 differs from the others: rank 1 has .* on meta"):
        model(*models.batches(1, 11)[0])


@pytest.mark.parametrize("compile", ["eager", None])
@on_ranks(2)
def test_a_model_that_has_no_memory_yet_says_so(compile):
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven, compile=compile)
    model.to("meta")
    with pytest.raises(Exception, match=r"\[rank \d\] a sharded parameter .* is on the meta device.*model\.to_empty"):
        call(*models.batches(1, 11)[0])


@on_ranks(2)
def test_ranks_that_take_their_cluster_for_different_ones_follow_one_schedule():
    torch._dynamo.reset()
    free = replace(models.SLOW_WIRE, within=replace(models.SLOW_WIRE.within, bandwidth=1e15))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == ODD:
            patch.setattr("vescale_compile.capture.cluster_for", lambda *_: free)
        _, call = models.sharded(models.deep)
        call(*models.batches(1, 11)[0]).backward()


@pytest.mark.parametrize(
    ("what", "failing", "error", "size"),  # no such graph was agreed on
    [("_lower_eager", 0, RuntimeError, 1), ("summarize", 1, RuntimeError, 3), ("summarize", 1, KeyboardInterrupt, 7)],
)
@on_ranks(2)
def test_a_rank_that_can_not_compile_tells_the_others_why(what, failing, error, size):
    def refuse(*_):
        raise error("too many words")

    torch._dynamo.reset()
    mine, message = dist.get_rank() == failing, f"rank {failing} failed to compile: {error.__name__}: too many words"
    with pytest.MonkeyPatch.context() as patch:
        if mine:
            patch.setattr(backend, what, refuse)
        _, call = models.sharded(lambda: models.Uneven(size))
        with pytest.raises(BaseException, match="too many words" if mine else message):
            call(*models.batches(1, 11)[0])
    dist.barrier()
    agree(init_device_mesh("cpu", (2,)), "what comes after it", [], deadline_s=10)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cluster": "/no/such/file"}, "neither a preset"),
        ({"lowering": "aot"}, "lowering='aot': choose one of"),
        ({"lowring": "eager"}, "lowring"),
    ],
    ids=["no file", "no value", "no option"],
)
@on_ranks(2)
def test_a_rank_whose_options_are_wrong_tells_the_others(wrong, said):
    torch._dynamo.reset()
    mine = dist.get_rank() == ODD
    model, _ = models.sharded(lambda: models.Uneven(1), compile=None)  # no such graph was agreed on
    options = {"lowering": "eager", "deadline": 60, **(wrong if mine else {})}
    with pytest.raises(Exception, match=said if mine else f"rank {ODD} failed to compile: ValueError: .*{said}"):
        torch.compile(model, backend="vescale", options=options)(*models.batches(1, 11)[0])
    dist.barrier()


@on_ranks(2)
def test_a_rank_from_which_pytorch_asks_to_compile_again_has_not_failed():
    model, _ = models.sharded(models.Uneven)
    if dist.get_rank() == ODD:
        with pytest.raises(RestartAnalysis), others_hear_of_failures(buffers_in(model)):
            raise RestartAnalysis
    agree(init_device_mesh("cpu", (2,)), "what comes after it", [], deadline_s=10)


@on_ranks(2)
def test_of_a_rank_that_leaves_compiled_code_where_another_compiles_it_is_said_why_ranks_do():
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven)
    batch = models.batches(1, 11)[0]
    call(*batch).backward()
    run = model if dist.get_rank() == ODD else call
    said = "rank 1 has 'outside compiled code' where rank 0 has 'compiled graph'. A rank has left .*: Dynamo stops"
    with torch.no_grad(), pytest.raises(Exception, match=said):
        run(*batch)


@on_ranks(2)
def test_all_ranks_may_leave_compiled_code():
    torch._dynamo.reset()
    model, call = models.sharded(models.Uneven)
    batch = models.batches(1, 11)[0]
    assert model(*batch).item() == pytest.approx(call(*batch).item(), rel=1e-6)
    assert model(*batch).item() == pytest.approx(call(*batch).item(), rel=1e-6)


@on_ranks(2)
def test_ranks_at_different_collectives_take_nothing_for_what_it_is_not():
    group = dist.new_group(timeout=timedelta(seconds=1))
    shard, full = torch.full((4,), 7.0), torch.zeros(8)
    if dist.get_rank() == ODD:
        pending = start_all_gather(shard, full, group)
    else:
        pending = start_reduce_scatter(full, shard, torch.zeros(4), group)
    # Whoever is at the deadline first closes the connection, which may be what the other hears.
    with pytest.raises(RuntimeError, match=r"(?i)timed out|closed by peer"):
        pending.wait()
    assert full[:4].tolist() == [0.0] * 4


@on_ranks(3)  # which no other test needs any more
def test_a_rank_that_has_left_out_a_backward_is_given_nothing_of_it(tmp_path):
    """After an exception, say, that it alone has caught: its next forward gathers what the others' backward does."""
    torch._dynamo.reset()
    initialize_again(tmp_path / "store")
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    for layer in model:
        vc.fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    call = torch.compile(model, backend="vescale", options={"lowering": "eager"})
    x = torch.ones(2, 8, requires_grad=True)
    loss = call(x).sum()
    forget_carried()
    go_on = functools.partial(call, x) if dist.get_rank() == ODD else loss.backward
    with pytest.raises(RuntimeError, match=r"(?i)timed out|closed by peer"):
        go_on()


@on_ranks(2)
def test_a_rank_that_leaves_compiled_code_alone_says_so_at_the_deadline():
    torch._dynamo.reset()
    model, _ = models.sharded(models.Uneven)
    options = {"lowering": "eager", "deadline": 20 if dist.get_rank() != ODD else 1.5}
    torch.compile(model, backend="vescale", options=options)(*models.batches(1, 11)[0])
    if dist.get_rank() == ODD:
        # The last test in these processes: ranks can't agree on anything once one has waited in vain.
        with (
            mock.patch.object(agreement, "_GRACE_S", 0.5),
            pytest.raises(RanksMissing, match=r"(?s)1\.5 s.*recompile_limit"),
        ):
            model(*models.batches(1, 11)[0])
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_compiles_anew_meets_those_that_have_compiled_before_the_process_group_was_initialized_again(
    tmp_path,
):
    """As a process that has taken the place of one that died."""

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = vc.fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
        compiled = torch.compile(model, backend="vescale", options={"lowering": "eager", "deadline": 20})
        compiled(torch.ones(2, 4)).sum().backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    torch._dynamo.reset()
    initialize_again(tmp_path / "first")
    before = trained()
    initialize_again(tmp_path / "second")
    if dist.get_rank() == ODD:
        torch._dynamo.reset()
    for expected, found in zip(before, trained(), strict=True):
        assert torch.equal(expected, found)
