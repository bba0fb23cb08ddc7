"""What a program may do, through the code that Inductor generates: the lowering that users get.

Two models have it all between them, for compiling takes long. Each has a twin on every rank that is neither sharded nor
compiled and sees that rank's batches: its gradients, averaged over the ranks, are what the model must get. No test
changes parameters, so one goes on with what another has compiled.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import vescale_compile as vc
from vescale_compile.backend import vescale

pytestmark = pytest.mark.slow  # left out of `make test-fast`

VOCAB, WIDTH = 16, 8


class Everything(nn.Module):
    """A table that looks up and scores, a checkpointed unit, a frozen one, batch norm, and a parameter in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        x = (self.norm(self.layers[1](x)) * self.gain).float()
        return F.cross_entropy(self.head(x), labels.flatten())


class Broken(nn.Module):
    """A graph break between two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        torch._dynamo.graph_break()
        return self.layers[1](x)


@dataclass
class Twins:
    """A sharded model, and the same model unsharded."""

    sharded: nn.Module
    whole: nn.Module
    graphs: list[list[str]] = field(default_factory=list)  # operators of all that was compiled

    @functools.cached_property
    def compiled(self) -> Callable[..., Tensor]:
        backend = functools.partial(vescale, on_graph=self._note)
        return torch.compile(self.sharded, backend=backend, dynamic=True)

    def _note(self, graph: fx.Graph) -> None:
        self.graphs.append([str(node.target) for node in graph.nodes])

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What the sharded and the whole model return."""
        return self.compiled(*inputs), self.whole(*inputs)

    def step(self, shape: tuple[int, int] = (2, 12)) -> None:
        """Whose losses and gradients are the same."""
        ours, theirs = self(*models.batches(1, VOCAB, shape=shape)[0])
        torch.testing.assert_close(ours, theirs)
        ours.backward()
        theirs.backward()
        self.assert_same_gradients()

    def assert_same_gradients(self, rtol: float = 1e-4, atol: float = 1e-6) -> None:
        models.average_gradients(self.whole)
        for (name, ours), theirs in zip(self.sharded.named_parameters(), self.whole.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=rtol, atol=atol)

    def forget(self) -> None:
        self.sharded.zero_grad()
        self.whole.zero_grad()


@functools.cache
def _twins(build: models.Model) -> Twins:
    """Those of this rank, whose process serves this file alone."""
    return Twins(vc.fully_shard(models.build(build)), models.build(build))


def twins(build: models.Model) -> Twins:
    both = _twins(build)
    both.forget()
    return both


@on_ranks(2, deadline_s=300)
def test_one_compilation_serves_batches_of_every_size():
    both = twins(Everything)
    for shape in [(2, 12), (3, 12), (5, 7)]:
        both.forget()
        both.step(shape)
    assert len(both.graphs) == 2  # a forward and a backward


@on_ranks(2, deadline_s=300)
def test_what_is_checkpointed_is_computed_again_in_the_backward():
    both = twins(Everything)
    both.step()
    forward, backward = (graph.count("aten.addmm.default") for graph in both.graphs[:2])
    assert (forward, backward) == (4, 1)


@on_ranks(2, deadline_s=300)
def test_a_table_that_looks_up_and_scores_gets_the_gradients_of_both():
    both = twins(Everything)
    both.step()
    assert both.sharded.head.weight is both.sharded.embed.weight
    assert both.sharded.head.weight.grad is not None


@on_ranks(2, deadline_s=300)
def test_frozen_parameters_get_no_gradient_and_those_before_them_do():
    both = twins(Everything)
    both.step()
    assert [param.grad for param in both.sharded.layers[1].parameters()] == [None] * 4
    assert all(param.grad is not None for param in both.sharded.layers[0].parameters())


@on_ranks(2, deadline_s=300)
def test_gradients_have_the_dtypes_of_their_parameters():
    both = twins(Everything)
    both.step()
    assert both.sharded.gain.grad.dtype == torch.float64
    assert both.sharded.embed.weight.grad.dtype == torch.float32


@on_ranks(2, deadline_s=300)
def test_running_statistics_are_those_of_all_batches_so_far():
    both = twins(Everything)
    both.step()
    for ours, theirs in zip(both.sharded.buffers(), both.whole.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert both.sharded.norm.num_batches_tracked > 0


@on_ranks(2, deadline_s=300)
def test_two_forwards_then_one_backward():
    both = twins(Everything)
    first, second = (both(*batch) for batch in models.batches(2, VOCAB))
    for one, other in zip(first, second, strict=True):
        (one + other).backward()
    both.assert_same_gradients()


@on_ranks(2, deadline_s=300)
def test_gradients_accumulate_and_are_reduced_at_the_end():
    """By the same graphs."""
    both = twins(Everything)
    *earlier, last = models.batches(3, VOCAB)
    with vc.no_sync(both.sharded):
        for batch in earlier:
            for loss in both(*batch):
                loss.backward()
    assert {param.grad for param in both.sharded.parameters()} == {None}
    compiled = len(both.graphs)
    for loss in both(*last):
        loss.backward()
    both.assert_same_gradients()
    assert len(both.graphs) == compiled


def autocast_step(both: Twins) -> tuple[Tensor, Tensor]:
    """What both return."""
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = both(x)
    for result in results:
        result.float().square().sum().backward()
    both.assert_same_gradients(rtol=0.016, atol=1e-3)
    return results


@on_ranks(2, deadline_s=300)
def test_autocast_computes_in_lower_precision_and_gradients_are_those_of_the_parameters():
    both = twins(Broken)
    ours, theirs = autocast_step(both)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)
    assert {param.grad.dtype for param in both.sharded.parameters()} == {torch.float32}


@on_ranks(2, deadline_s=300)
def test_what_a_graph_break_cuts_in_two_is_one_computation():
    both = twins(Broken)
    autocast_step(both)
    assert len(both.graphs) == 4  # each part's forward and backward
