"""How long one rank plans a checkpoint of all, while they wait: ``python bench/checkpoint_plan.py``.

Of one layer of a published model, sharded over so many ranks: what ``torch.distributed.checkpoint`` does on its first
rank with the pieces that each rank saves, by PyTorch's default planner and by ``vc.SavePlanner``, which make the same
plan. CPU seconds; a model has as many layers, and with AdamW three tensors for each parameter.
"""

from __future__ import annotations

import argparse
import time

import torch
from options import count
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import vescale_compile as vc
from vescale_compile.planner import plan_unit
from vescale_compile.planner.models import PUBLISHED, published
from vescale_compile.ragged.checkpoint import run_to_items
from vescale_compile.ragged.placement import RaggedShard


def plans_of_ranks(model: str, world_size: int) -> list[SavePlan]:
    """What each rank saves of the model's first layer, as its shards are cut with no blocks to be kept whole."""
    units = published(model).specs(2, lambda name, shape: None)
    layer = next(tensors for name, tensors in units.items() if name.endswith(".0"))
    items: list[list[WriteItem]] = [[] for _ in range(world_size)]
    for buffer in plan_unit(layer, world_size).buffers:
        for name, shape in ((tensor.name, torch.Size(tensor.shape)) for tensor in buffer.tensors):
            for rank, held in RaggedShard(*buffer.ragged_shard(name)).held(shape).items():
                items[rank] += run_to_items(name, *held, shape, TensorProperties())
    return [SavePlan(each) for each in items]


def planned(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[Metadata, float]:
    """What is planned, and the CPU seconds that it takes."""
    start = time.process_time()
    _, metadata = planner.create_global_plan(plans)
    return metadata, time.process_time() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PUBLISHED, default="gpt-oss-120b", help="default: %(default)s")
    parser.add_argument("--ranks", type=count, nargs="+", default=[256, 1024, 4096], help="default: %(default)s")
    args = parser.parse_args()
    print(f"one layer of {args.model}\n{'ranks':>8}{'pieces':>10}{'default':>12}{'SavePlanner':>14}")
    for ranks in args.ranks:
        plans = plans_of_ranks(args.model, ranks)
        theirs, default = planned(DefaultSavePlanner(flatten_state_dict=False), plans)
        ours, sorting = planned(vc.SavePlanner(flatten_state_dict=False), plans)
        if ours != theirs:
            raise RuntimeError(f"the plans for {ranks} ranks differ")
        pieces = sum(len(plan.items) for plan in plans)
        print(f"{ranks:8,}{pieces:10,}{default:10.2f} s{sorting:12.2f} s")


if __name__ == "__main__":
    main()
