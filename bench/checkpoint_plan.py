"""How long one rank plans a checkpoint of all, while they wait: ``python bench/checkpoint_plan.py``.

Of one layer of a published model and AdamW's states of it, sharded over so many ranks, or over those of each replica:
what ``torch.distributed.checkpoint`` does on its first rank with what each rank sends. It unpickles that, plans for
all, and pickles what each is sent back; by PyTorch's default planner and by ``vc.SavePlanner``, whose checkpoints are
the same. CPU seconds. A model has as many layers; and the names that each rank sends besides, as it has parameters, are
left out.
"""

from __future__ import annotations

import argparse
import pickle
import time
from itertools import chain

import torch
from options import count
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

import vescale_compile as vc
from vescale_compile.planner import plan_unit
from vescale_compile.planner.models import PUBLISHED, published
from vescale_compile.ragged.checkpoint import run_to_items
from vescale_compile.ragged.placement import RaggedShard
from vescale_compile.ragged.save_planner import evenly

STORED = ("model", "exp_avg", "exp_avg_sq")  # of each parameter, sharded as it is


class Layer:
    """What ranks hold of a model's first layer, cut among a replica's ``shards`` with no blocks to be kept whole."""

    def __init__(self, model: str, shards: int) -> None:
        units = published(model).specs(2, lambda name, shape: None)
        tensors = next(tensors for name, tensors in units.items() if name.endswith(".0"))
        self.shards = shards
        self.sizes: dict[str, int] = {}  # bytes of a whole tensor
        self.pieces: list[dict[str, list[WriteItem]]] = [{} for _ in range(shards)]
        self.steps: dict[str, WriteItem] = {}
        for buffer in plan_unit(tensors, shards).buffers:
            for tensor in buffer.tensors:
                self._add(tensor.name, torch.Size(tensor.shape), RaggedShard(*buffer.ragged_shard(tensor.name)))

    def _add(self, parameter: str, shape: torch.Size, placement: RaggedShard) -> None:
        for name in (f"{kind}.{parameter}" for kind in STORED):
            self.sizes[name] = shape.numel() * 4
            for rank, held in placement.held(shape).items():
                self.pieces[rank][name] = run_to_items(name, *held, shape, TensorProperties())
        self.steps[f"step.{parameter}"] = _scalar(f"step.{parameter}")

    def default_plans(self, replicas: int) -> list[SavePlan]:
        """What each rank sends: all that it holds."""
        every = list(self.steps.values())
        of_shards = [SavePlan([*chain.from_iterable(pieces.values()), *every]) for pieces in self.pieces]
        return of_shards * replicas

    def shared_plans(self, replicas: int) -> list[SavePlan]:
        """What each rank sends by ``vc.SavePlanner``: its share of what others hold, too."""
        share = evenly(self.sizes, replicas)
        counter = evenly(dict.fromkeys(self.steps, 1), replicas * self.shards)
        plans = [
            SavePlan([item for name, items in pieces.items() if share[name] == replica for item in items])
            for replica in range(replicas)
            for pieces in self.pieces
        ]
        for name, step in self.steps.items():
            plans[counter[name]].items.append(step)
        return plans


def _scalar(name: str) -> WriteItem:
    whole = ChunkStorageMetadata(torch.Size(), torch.Size())
    data = TensorWriteData(chunk=whole, properties=TensorProperties(), size=torch.Size())
    return WriteItem(index=MetadataIndex(name, torch.Size()), type=WriteItemType.TENSOR, tensor_data=data)


def planned(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[Metadata, float]:
    """What is planned, and the CPU seconds that it takes."""
    sent = [pickle.dumps(plan) for plan in plans]
    start = time.process_time()
    final, metadata = planner.create_global_plan([pickle.loads(plan) for plan in sent])
    for plan in final:
        pickle.dumps(plan)
    return metadata, time.process_time() - start


def pieces_of(metadata: Metadata) -> dict[str, list[str]]:
    """The pieces of each tensor, in an order of their own."""
    entries = metadata.state_dict_metadata.items()
    return {name: sorted(map(str, entry.chunks)) for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PUBLISHED, default="gpt-oss-120b", help="default: %(default)s")
    parser.add_argument("--ranks", type=count, nargs="+", default=[256, 1024, 4096], help="default: %(default)s")
    parser.add_argument("--replicas", type=count, default=1, help="of hybrid sharding, default: %(default)s")
    args = parser.parse_args()
    print(f"one layer of {args.model}, {args.replicas} replicas")
    print(f"{'ranks':>8}{'sent by default':>18}{'takes':>12}{'by SavePlanner':>18}{'takes':>12}")
    for ranks in args.ranks:
        if ranks % args.replicas:
            parser.error(f"{args.replicas} replicas do not divide {ranks} ranks")
        layer = Layer(args.model, ranks // args.replicas)
        sent, shared = layer.default_plans(args.replicas), layer.shared_plans(args.replicas)
        theirs, default = planned(DefaultSavePlanner(flatten_state_dict=False), sent)
        ours, sharing = planned(vc.SavePlanner(flatten_state_dict=False), shared)
        if pieces_of(ours) != pieces_of(theirs):
            raise RuntimeError(f"the checkpoints of {ranks} ranks differ")
        numbers = [sum(len(plan.items) for plan in plans) for plans in (sent, shared)]
        print(f"{ranks:8,}{numbers[0]:18,}{default:10.2f} s{numbers[1]:18,}{sharing:10.2f} s", flush=True)


if __name__ == "__main__":
    main()
