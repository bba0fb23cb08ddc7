"""Fully sharded data parallel training as torch.compile graph passes over RaggedShard buffers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from . import optim
    from .accumulation import no_sync
    from .clipping import clip_grad_norm_
    from .inspection import explain
    from .passes.context import GraphError
    from .planner import Elements, Rows, TensorSpec, Whole, plan_unit
    from .quantize import MXFP8, BlockFP8, BlockInt8
    from .ragged.dtensor import RaggedDTensor
    from .ragged.placement import RaggedShard
    from .ragged.save_planner import SavePlanner
    from .rounding import load_rounding_state, rounding_state
    from .runtime.agreement import RanksDisagree, RanksMissing
    from .sharded_class import register_forward_method
    from .sharding import fully_shard
    from .simulation import simulate

__all__ = [
    "MXFP8",
    "BlockFP8",
    "BlockInt8",
    "Elements",
    "GraphError",
    "MixedPrecisionPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "RanksDisagree",
    "RanksMissing",
    "Rows",
    "SavePlanner",
    "TensorSpec",
    "Whole",
    "clip_grad_norm_",
    "explain",
    "fully_shard",
    "load_rounding_state",
    "no_sync",
    "optim",
    "plan_unit",
    "register_forward_method",
    "rounding_state",
    "simulate",
]

# Loaded at first use: planning needs no torch, and loading it takes seconds.
_HOMES = {
    "BlockFP8": "vescale_compile.quantize",
    "BlockInt8": "vescale_compile.quantize",
    "GraphError": "vescale_compile.passes.context",
    "MXFP8": "vescale_compile.quantize",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "RaggedDTensor": "vescale_compile.ragged.dtensor",
    "RaggedShard": "vescale_compile.ragged.placement",
    "RanksDisagree": "vescale_compile.runtime.agreement",
    "RanksMissing": "vescale_compile.runtime.agreement",
    "SavePlanner": "vescale_compile.ragged.save_planner",
    "clip_grad_norm_": "vescale_compile.clipping",
    "explain": "vescale_compile.inspection",
    "fully_shard": "vescale_compile.sharding",
    "load_rounding_state": "vescale_compile.rounding",
    "register_forward_method": "vescale_compile.sharded_class",
    "rounding_state": "vescale_compile.rounding",
    "no_sync": "vescale_compile.accumulation",
    "simulate": "vescale_compile.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "optim":
        return importlib.import_module("vescale_compile.optim")
    return getattr(importlib.import_module(_HOMES.get(name, "vescale_compile.planner")), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
