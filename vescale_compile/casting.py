"""What goes into a unit and comes out of it, in the dtypes of its mixed precision policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """Casts every floating-point tensor in ``tree``, as torch.distributed.fsdp does at a unit's edge: also in
    dataclasses and in subclasses of dict and list, which are leaves to PyTorch's trees. These, and a tree as a whole,
    are passed as they are where nothing in them is cast."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {field: cast_tensors(getattr(leaf, field.name), dtype) for field in dataclasses.fields(leaf)}
            if all(value is getattr(leaf, field.name) for field, value in fields.items()):
                return leaf  # a configuration, say, which may not be easily made again
            copied = dataclasses.replace(leaf, **{field.name: value for field, value in fields.items() if field.init})
            for field, value in fields.items():
                if not field.init:  # it would be what it is at first
                    object.__setattr__(copied, field.name, value)
            return copied
        if isinstance(leaf, dict):
            items = {key: cast_tensors(value, dtype) for key, value in leaf.items()}
            if all(value is leaf[key] for key, value in items.items()):
                return leaf
            filled = type(leaf)()
            for key, value in items.items():
                filled[key] = value
            return filled
        if isinstance(leaf, list):
            values = [cast_tensors(value, dtype) for value in leaf]
            same = all(value is own for value, own in zip(values, leaf, strict=True))
            return leaf if same else type(leaf)(values)
        return leaf

    copied = tree_map(cast, tree)
    same = all(new is own for new, own in zip(tree_leaves(copied), tree_leaves(tree), strict=True))
    return tree if same else copied
