"""What other systems pad on the same shapes, by their own rules, which keep single rows whole at most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vescale_compile.planner.layout import ceil_to
from vescale_compile.planner.spec import TensorSpec


def fsdp2_padding(tensors: Sequence[TensorSpec], world_size: int) -> int:
    """Elements that PyTorch's ``fully_shard`` (FSDP2) adds to the buffer of its all-gather.

    It chunks dimension 0 of each parameter as ``torch.chunk`` does and pads every chunk to the first one's
    size: ``ceil(shape[0] / world_size)`` rows on each rank (``FSDPParam._init_sharded_param``).
    """
    return sum(
        (ceil_to(rows, world_size) - rows) * (tensor.numel // rows)
        for tensor in tensors
        for rows in tensor.shape[:1] or (1,)
    )


def megatron_fsdp_padding(tensors: Sequence[TensorSpec], world_size: int) -> int:
    """Elements that Megatron-FSDP adds to a bucket, at least.

    It rounds the bucket up to a multiple of ``world_size`` times the least common multiple of the parameters'
    row sizes, ``prod(shape[1:])`` (``build_data_parallel_buffer_index``). What its packing of single
    parameters adds inside the bucket is not counted.
    """
    row = math.lcm(*(math.prod(tensor.shape[1:]) for tensor in tensors))
    total = sum(tensor.numel for tensor in tensors)
    return ceil_to(total, world_size * row) - total
