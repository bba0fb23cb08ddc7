"""What the census counts in graphs is what a profiler counts in a real step."""

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor, nn

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.passes.summary import Kind
from vescale_compile.report import GraphReport
from vescale_compile.runtime.arrivals import settle

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import step_census
from profiling import StepProfile, recorded, summarized

pytestmark = pytest.mark.slow  # left out of `make test-fast`

BF16 = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
MOVED = {Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.BUFFER}


class Padded(nn.Module):
    """A product of which Inductor, on GPUs, would pad an operand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.head = nn.Parameter(torch.ones(13, 11), requires_grad=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores = F.pad(self.embed(tokens), (0, 3)) @ F.pad(self.head, (0, 0, 0, 3))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Joined(nn.Module):
    """A program that puts parameters together before it reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.first, self.second = nn.Parameter(torch.ones(4, 13)), nn.Parameter(torch.ones(7, 13))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        scores = self.embed(tokens) @ torch.cat([self.first, self.second]).t()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Generated(nn.Module):
    """Gradients that generated kernels compute, as sums or element by element, of a table that looks up and scores, and
    of a matrix used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.places = nn.Parameter(torch.ones(2, 12, 8))
        self.norm, self.shift = nn.LayerNorm(8), nn.Parameter(torch.zeros(12, 1))
        self.mix = nn.Parameter(torch.ones(8, 8))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.norm(self.table(tokens) * self.places) + self.shift
        for _ in range(3):
            h = h + torch.tanh(h @ self.mix)
        return F.cross_entropy((h @ self.table.weight.t()).flatten(0, 1), labels.flatten())


class Placed(nn.Module):
    """Gradients that generated kernels store before they place them: of a diagonal, and of sums of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.mix, self.shift = nn.Parameter(torch.ones(13, 13)), nn.Parameter(torch.ones(12, 13))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.embed(tokens)) * self.mix.diagonal() + self.shift.cumsum(0)
        return h.square().mean()


class Promoting(nn.Module):
    """A gain that is gathered in bf16 and taken to fp32 on the way, by the kernel that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gain = nn.Embedding(11, 13), nn.Parameter(torch.ones(13))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return (torch.tanh(self.embed(tokens).float()) * self.gain.float()).square().mean()


def uneven_llama() -> nn.Module:
    """One layer in fp32, of a model in bf16; sizes that leave places of parameters unaligned."""
    model = Llama(LlamaConfig(layers=1, dim=30, heads=3, kv_heads=1, hidden_dim=43, vocab_size=61))
    fp32 = vc.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    vc.fully_shard(model.layers[0], mp_policy=fp32)
    return model


class Counted(NamedTuple):
    """A step's census, of its graphs and of its profile, and the profile."""

    graphs: Counter[step_census.Key]
    step: Counter[step_census.Key]
    profile: StepProfile


@functools.cache
def counted(build: models.Model, lowering: str, vocab: int, shards: int = 2, **shard_options) -> Counted:
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(build), **shard_options)
    data = models.batches(1, vocab)[0]
    graphs: list[GraphReport] = []
    backend = functools.partial(vescale, options={"lowering": lowering}, on_compiled=graphs.append)
    call = torch.compile(model, backend=backend)
    call(*data).backward()
    (graph,) = graphs
    settle()  # or the last reductions would end, and be cast, in the step that is profiled
    model.zero_grad()
    recording = recorded(lambda: call(*data).backward(), torch.device("cpu"))
    units = [unit.name for unit in graph.units]
    return Counted(
        of_graph(graph),
        step_census.of_step(recording.tree, recording.kernels, units, shards),
        summarized(recording, 0, shards, torch.device("cpu")),
    )


def of_graph(graph: GraphReport) -> Counter[step_census.Key]:
    return step_census.of_graphs({part: summary.entries for part, summary in graph.parts.items()})


def total(census: Counter[step_census.Key], *kinds: Kind) -> int:
    return sum(nbytes for (_, kind, _, _), nbytes in census.items() if kind in kinds)


# In Inductor's kernels nothing tells a concatenation from copies, or a load that is masked to pad from arithmetic: both
# are compared operator by operator alone. Quantization is arithmetic in both: tests/quantize/test_passes.py.
@pytest.mark.parametrize(
    ("build", "vocab", "lowering", "shard_options", "kinds"),
    [
        (models.one_layer_llama, 64, "eager", {"mp_policy": BF16, "reshard_after_forward": False}, {Kind.CAST}),
        (Padded, 11, "eager", {}, {Kind.COPY_IN, Kind.COPY}),
        (Joined, 11, "eager", {}, {Kind.COPY_IN, Kind.COPY, Kind.CONCATENATION}),
        (Generated, 16, "inductor", {}, {Kind.COPY_IN}),
        (Placed, 11, "inductor", {}, {Kind.COPY_IN, Kind.COPY}),
        (Promoting, 11, "inductor", {"mp_policy": BF16}, {Kind.CAST}),
        (uneven_llama, 61, "inductor", {"mp_policy": BF16}, {Kind.COPY_IN, Kind.CAST, Kind.COPY}),
    ],
)
@on_ranks(2, deadline_s=300)
def test_the_census_of_graphs_is_that_of_a_step(build, vocab, lowering, shard_options, kinds):
    agree(counted(build, lowering, vocab, **shard_options), kinds)


@pytest.mark.parametrize(
    ("build", "lowering", "shard_options"), [(Joined, "eager", {}), (Promoting, "inductor", {"mp_policy": BF16})]
)
@on_ranks(2, deadline_s=300)
def test_the_census_of_what_is_explained_is_that_of_what_runs(build, lowering, shard_options):
    ran = counted(build, lowering, 11, **shard_options).graphs
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(build), **shard_options)
    (graph,) = vc.explain(model, *models.batches(1, 11)[0], options={"lowering": lowering}).graphs
    assert of_graph(graph) == ran


@on_ranks(3)
def test_the_census_of_three_ranks_whose_shards_are_padded_is_that_of_a_step():
    agree(counted(models.Uneven, "eager", 11, shards=3), {Kind.COPY_IN, Kind.COPY})


def agree(census: Counted, kinds: set[Kind]) -> None:
    """Of the graphs and of the step, in all that is moved, besides by collectives of those kinds."""
    graphs, step, profile = census
    assert graphs == step, (graphs - step, step - graphs)
    assert {kind for _, kind, _, _ in graphs} == MOVED | kinds
    world = dist.get_world_size()
    moved = total(graphs, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    assert profile.collectives["send"].sent_bytes == moved * (world - 1) / world
    assert profile.copies.copied_bytes == total(graphs, Kind.COPY, Kind.CONCATENATION)
    assert profile.copies.copy_in_bytes == total(graphs, Kind.COPY_IN)
    assert profile.copies.cast_bytes == total(graphs, Kind.CAST)
