"""The structure-aware planner: places the tensors of a unit in buffers of equal shards, cutting no block.

Pure Python: it plans trillion-parameter models for tens of thousands of ranks without PyTorch.
"""

from vescale_compile.planner.plan import BufferPlan, UnitPlan
from vescale_compile.planner.remedies import Remedy, remedies
from vescale_compile.planner.spec import Elements, Granularity, Rows, TensorSpec, Whole, combine
from vescale_compile.planner.unit import plan_unit

__all__ = [
    "BufferPlan",
    "Elements",
    "Granularity",
    "Remedy",
    "Rows",
    "TensorSpec",
    "UnitPlan",
    "Whole",
    "combine",
    "plan_unit",
    "remedies",
]
