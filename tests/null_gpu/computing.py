"""What null GPUs that compute leave to Python: Triton's kernels, which are interpreted, and operators of PyTorch's own.

Their memory is the process's, so that both work on it where it lies. All is over when its launch returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._inductor.runtime import triton_helpers
from torch._ops import OpOverload
from torch.library import Library
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

aten = torch.ops.aten
_OPERATORS = [
    aten._foreach_copy_.default,
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.addmm.default,
    aten.addmm.out,
    aten.copy_.default,
    aten.div.Tensor,
    aten.fill_.Scalar,
    aten.full.out,
    aten.index.Tensor,
    aten.index_copy_.default,
    aten.index_select.default,
    aten.index_select.out,
    aten.mul.Tensor,
    aten.mul_.Tensor,
    aten.scatter_.src,
    aten.sum.dim_IntList,
    aten.topk.default,
    aten.zero_.default,
]
"""that run outside Inductor's kernels, by the optimizer, say; of any other kernel the null GPU says that it can't"""
_NAMED_OTHERWISE = {"rsqrt": lambda x: 1 / np.sqrt(x)}
_library = Library("aten", "IMPL")
_atomic = InterpreterBuilder.create_atomic_rmw


def compute() -> None:
    """From now on. With TRITON_INTERPRET in the environment since before Triton was imported."""
    for operator in _OPERATORS:
        _library.impl(operator, _computing(operator), "CUDA")
    triton_helpers.libdevice = _Functions()
    GridExecutor._init_args_hst = lambda _, args, kwargs: tree_map(_on_the_cpu, (list(args), kwargs))
    GridExecutor._restore_args_dev = lambda *_: None
    InterpreterBuilder.create_atomic_rmw = _atomic_on_each


def _on_the_cpu(value: Any) -> Any:
    """The memory of a tensor as one of the CPU's."""
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    storage = value.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    same = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype).set_(same, value.storage_offset(), value.shape, value.stride())


def _computing(operator: OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = operator(*tree_map(_on_the_cpu, args), **tree_map(_on_the_cpu, kwargs))
        if not operator._schema.returns:
            return None
        if operator._schema.is_mutable:
            return kwargs.get("out", args[0])
        device = next(each.device for each in args if isinstance(each, Tensor) and each.device.type == "cuda")
        return tree_map(lambda each: torch.empty_like(each, device=device).copy_(each), result)

    return run


class _Functions:
    """In the place of NVIDIA's library of them, which an interpreter can't read."""

    def __getattr__(self, name: str) -> Callable[..., tl.tensor]:
        function = _NAMED_OTHERWISE[name] if name in _NAMED_OTHERWISE else getattr(np, name)

        def call(*values: Any) -> tl.tensor:
            dtype = next(value.dtype.scalar for value in values if isinstance(value, tl.tensor))
            numbers = [value.handle.data if isinstance(value, tl.tensor) else value for value in values]
            found = np.asarray(function(*numbers)).astype(np.float64 if dtype == tl.float64 else np.float32)
            return tl.tensor(
                TensorHandle(found, dtype), tl.block_type(dtype, list(found.shape)) if found.ndim else dtype
            )

        return call


def _atomic_on_each(self: InterpreterBuilder, *operands: Any) -> Any:
    """The interpreter's own takes what was broadcast from one row for that one."""
    whole = (
        TensorHandle(np.array(each.data), each.dtype) if isinstance(each, TensorHandle) else each for each in operands
    )
    return _atomic(self, *whole)
