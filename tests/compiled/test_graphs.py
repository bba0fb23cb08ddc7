"""What the compiled graphs hold: how many collectives, and that every rank has the same graphs."""

import os
from collections import Counter
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch import fx

import vescale_compile as vc
from vescale_compile.dump import GraphDump
from vescale_compile.passes.context import Part

GATHER, REDUCE = "start_all_gather", "start_reduce_scatter"
CARRY, TAKE = "carry_all_gather", "take_all_gather"  # the first gather of the backward, launched in the forward
UNITS = 3  # two blocks and the rest


def dump_of_one_step(directory: Path, build: models.Model, vocab: int, **options) -> dict[str, str]:
    """Compiles and trains one step with VESCALE_DUMP set; this rank's dumps by name."""
    torch._dynamo.reset()
    os.environ["VESCALE_DUMP"] = str(directory)
    try:
        model, call = models.sharded(build, **options)
        models.train(call, model.parameters(), models.batches(1, vocab))
    finally:
        del os.environ["VESCALE_DUMP"]
    (folder,) = (directory / f"rank{dist.get_rank()}").iterdir()
    return {path.stem: path.read_text() for path in sorted(folder.iterdir())}


def final(dumps: dict[str, str], part: str) -> str:
    return next(text for name, text in dumps.items() if name.endswith(f"{part}-after-verify"))


def collectives(text: str) -> Counter[str]:
    return Counter(name for name in (GATHER, REDUCE, CARRY, TAKE) for _ in range(text.count(f"vescale.{name}.default")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reshard", "ahead", "again"), [(True, {CARRY: 1}, {GATHER: UNITS - 2, TAKE: 1}), (False, {}, {})]
)
@on_ranks(2)
def test_a_unit_is_gathered_once_reduced_once_and_gathered_again_where_it_reshards(tmp_path, reshard, ahead, again):
    dumps = dump_of_one_step(tmp_path, models.Uneven, 11, reshard_after_forward=reshard)
    assert collectives(final(dumps, "forward")) == {GATHER: UNITS, **ahead}
    assert collectives(final(dumps, "backward")) == {REDUCE: UNITS, **again}


@pytest.mark.slow
def test_an_embedding_is_gathered_for_its_lookup_alone_and_leaves_its_memory_to_others():
    torch._dynamo.reset()
    with fake_world(2):
        model = vc.fully_shard(models.build(models.many_words))
        options = {"lowering": "eager", "cluster": models.SLOW_WIRE}
        (graph,) = vc.explain(model, *models.batches(1, 8192)[0], options=options).graphs
    assert "launch all_gather of (root)#0" not in graph.parts[Part.BACKWARD].schedule
    slots = [slot for slot in graph.parts[Part.FORWARD].slots if not slot.carried]
    (embedding,) = (slot for slot in slots if slot.tenants[0].what == "gathered parameters of (root)#0")
    end = embedding.offset + embedding.nbytes
    others = [slot for slot in slots if slot.offset < end and embedding.offset < slot.offset + slot.nbytes]
    assert sum(len(slot.tenants) for slot in others) > 1


@on_ranks(3)
def test_every_graph_is_the_same_on_every_rank_whatever_the_shards(tmp_path):
    dumps = dump_of_one_step(tmp_path, models.Uneven, 11)
    everyone: list[dict[str, str]] = [{}] * 3
    dist.all_gather_object(everyone, {name: text for name, text in dumps.items() if "before-hoist" not in name})
    assert everyone[0] == everyone[1] == everyone[2]
    assert len(everyone[0]) > 8


@on_ranks(2)
def test_dumps_are_numbered_in_the_order_of_the_passes(tmp_path):
    assert list(dump_of_one_step(tmp_path, models.Uneven, 11)) == [
        "00-captured-before-hoist",
        "01-captured-after-hoist",
        "02-captured-after-bind",
        "03-joint-before-reshard",
        "04-joint-after-reshard",
        "05-forward-before-expand",
        "06-forward-after-expand",
        "07-forward-after-sink",
        "08-forward-after-overlap",
        "09-forward-after-leave",
        "10-forward-after-assign",
        "11-forward-after-verify",
        "12-backward-before-expand",
        "13-backward-after-expand",
        "14-backward-after-sink",
        "15-backward-after-overlap",
        "16-backward-after-leave",
        "17-backward-after-assign",
        "18-backward-after-verify",
    ]


def test_the_graphs_of_an_earlier_run_are_removed(tmp_path, monkeypatch):
    earlier = [tmp_path / f"rank{rank}" / "compile7" / "00-dynamo.py" for rank in range(2)]
    for path in earlier:
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setenv("VESCALE_DUMP", str(tmp_path))
    GraphDump(0).write("before passes", fx.GraphModule({}, fx.Graph()), stage="dynamo")
    GraphDump(0).write("before passes", fx.GraphModule({}, fx.Graph()), stage="dynamo")
    assert [path.exists() for path in earlier] == [False, True]
    assert len([*tmp_path.glob("rank0/*/*.py")]) == 2


@on_ranks(2)
def test_the_backward_is_verified_before_the_forward_runs(tmp_path):
    torch._dynamo.reset()
    os.environ["VESCALE_DUMP"] = str(tmp_path)
    try:
        _, call = models.sharded(models.Uneven)
        call(*models.batches(1, 11)[0])
    finally:
        del os.environ["VESCALE_DUMP"]
    assert len(list(tmp_path.glob(f"rank{dist.get_rank()}/*/*-backward-after-verify.py"))) == 1


@on_ranks(2)
def test_depyf_dumps_the_graphs_of_the_passes_too(tmp_path):
    import depyf

    torch._dynamo.reset()
    folder = tmp_path / f"rank{dist.get_rank()}"
    _, call = models.sharded(models.Uneven)
    with depyf.prepare_debug(str(folder)):
        call(*models.batches(1, 11)[0]).backward()
    names = {path.name.split(".")[1] for path in folder.iterdir() if "vescale" in path.name}
    assert {"vescale_captured_after_bind", "vescale_joint_after_reshard", "vescale_backward_after_verify"} <= names
