"""Measures the library operators of given graphs on this machine: matrix products, convolutions, attention.

What they reach of a CPU's peak depends on their shapes, their strides and on what the caches hold by far more than on
a GPU. Measured, they are believed before the roofline. Only when it is asked to; nothing in compilation calls it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from vescale_compile.cost.compute import operator_key
from vescale_compile.cost.flops import depends_on_values, flops

_BUDGET_S = 0.4  # of each operator
_REPEATS = 12
_COLD_BYTES = 1 << 26  # that are touched between two calls, so that operands are not in caches, as in a step


def measure_operators(nodes: Iterable[fx.Node]) -> dict[str, float]:
    """Median seconds of each operator with a formula for its arithmetic, by :func:`.compute.operator_key`, with as many
    threads as PyTorch uses now.

    Not of products of groups of rows and of attention behind a mask, which take as long as their arguments' values say.

    Args:
        nodes: of aten graphs with ``meta["val"]``; equal operators are measured once.
    """
    formulas = FlopCounterMode(display=False).flop_registry
    found: dict[str, float] = {}
    for node in nodes:
        if not flops(node, formulas) or depends_on_values(node):
            continue
        key = operator_key(node)
        if key not in found:
            found[key] = _seconds(node)
    return found


@torch.no_grad()
def _seconds(node: fx.Node) -> float:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _filled(source.meta["val"]))
    run: Any = node.target
    swept = torch.zeros(_COLD_BYTES // 4)
    run(*args, **kwargs)
    times: list[float] = []
    end = time.perf_counter() + _BUDGET_S
    while len(times) < 3 or (len(times) < _REPEATS and time.perf_counter() < end):
        swept.add_(1.0)
        start = time.perf_counter()
        run(*args, **kwargs)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _filled(value: Any) -> Any:
    if isinstance(value, Tensor):
        real = torch.empty_strided([int(s) for s in value.shape], [int(s) for s in value.stride()], dtype=value.dtype)
        return real.normal_() if value.is_floating_point() else real.zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item) for item in value)
    return value
