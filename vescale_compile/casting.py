"""What goes into a unit and comes out of it, in the dtypes of its mixed precision policy."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """Casts every floating-point tensor in ``tree``, as torch.distributed.fsdp does at a unit's edge: also in
    dataclasses and in subclasses of dict and list, which are leaves to PyTorch's trees. Containers are copied."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            given = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{name: cast_tensors(getattr(leaf, name), dtype) for name in given})
        if isinstance(leaf, dict):
            copied = copy.copy(leaf)
            for key, value in leaf.items():
                copied[key] = cast_tensors(value, dtype)
            return copied
        if isinstance(leaf, list):
            return type(leaf)([cast_tensors(value, dtype) for value in leaf])
        return leaf

    return tree_map(cast, tree)
