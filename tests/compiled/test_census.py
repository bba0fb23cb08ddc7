"""What the census counts in graphs is what a profiler counts in a real step."""

import sys
from pathlib import Path

import models
import pytest
import torch
from ranks import on_ranks

import vescale_compile as vc
from vescale_compile.passes.summary import Direction, Entry, Kind

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from profiling import profiled

WORLD = 2
CASES = [
    ("llama", 64, "eager"),
    ("Uneven", 11, "eager"),
    pytest.param("Uneven", 11, "inductor", marks=pytest.mark.slow),
]


def counted(name: str, lowering: str, vocab: int, **shard_options):
    """The census of a model's graphs, and the profile of one step of it."""
    torch._dynamo.reset()
    model = vc.fully_shard(models.build(getattr(models, name)), **shard_options)
    data = models.batches(1, vocab)[0]
    options = {"lowering": lowering}
    (graph,) = vc.explain(model, *data, options=options).graphs
    call = torch.compile(model, backend="vescale", options=options)
    call(*data).backward()
    model.zero_grad()
    profile = profiled(lambda: call(*data).backward(), WORLD, torch.device("cpu"))
    return [entry for part in graph.parts.values() for entry in part.entries], profile


def total(entries: list[Entry], *kinds: Kind) -> int:
    return sum(entry.nbytes for entry in entries if entry.kind in kinds)


@pytest.mark.parametrize(("name", "vocab", "lowering"), CASES)
@on_ranks(WORLD, deadline_s=300)
def test_copies_and_collectives_of_a_step(name, vocab, lowering):
    entries, profile = counted(name, lowering, vocab)
    moved = total(entries, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    assert profile.collectives["send"].sent_bytes == moved * (WORLD - 1) / WORLD
    assert profile.copies.copied_bytes == total(entries, Kind.COPY, Kind.CONCATENATION)
    assert profile.copies.cast_bytes == total(entries, Kind.CAST) == 0


@on_ranks(WORLD)
def test_casts_of_shards_in_mixed_precision():
    policy = vc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    entries, profile = counted("llama", "eager", 64, mp_policy=policy)
    gathered = [entry for entry in entries if entry.kind is Kind.CAST and entry.direction is Direction.GATHER]
    assert profile.copies.by_operator["aten::copy_"] >= sum(entry.nbytes for entry in gathered) > 0
    assert profile.copies.copied_bytes == 0
