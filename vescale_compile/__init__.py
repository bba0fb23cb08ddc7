"""Fully sharded data parallel training as torch.compile graph passes over RaggedShard buffers."""

from torch.distributed.fsdp import MixedPrecisionPolicy

from .fully_shard import fully_shard
from .no_sync import no_sync
from .planner import Elements, Rows, TensorSpec, Whole, plan_unit
from .ragged_dtensor import RaggedDTensor
from .ragged_shard import RaggedShard

__all__ = [
    "Elements",
    "MixedPrecisionPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "Rows",
    "TensorSpec",
    "Whole",
    "fully_shard",
    "no_sync",
    "plan_unit",
]
