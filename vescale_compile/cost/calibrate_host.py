"""Measures what a GPU's host takes for a kernel of generated code, for :mod:`.calibrate`.

That is more than the launch itself: code allocates the kernel's output, checks it, and calls the launcher. So it is
measured where it happens, in the compiled forward and backward of a small encoder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from vescale_compile.cost.compute import compute_seconds, issue_seconds
from vescale_compile.cost.devices import DEVICES
from vescale_compile.torch_internals.inductor import inductor_compile, inductor_compile_inner

_LAYERS, _WIDTH, _TOKENS = 4, 64, 16  # a GPU is done with such kernels before the next is launched
_WARMUP, _REPEATS = 3, 30
_COUNTING = replace(next(iter(DEVICES.values())), issue=1.0)


@torch.enable_grad()
def seconds_of_host(device: str) -> float:
    """Seconds of the host for a kernel, of those that the cost model counts. It compiles for some ten seconds."""
    layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False).to(device, torch.bfloat16)
    tokens = torch.randn(1, _TOKENS, _WIDTH, device=device, dtype=torch.bfloat16)
    timed = _Timed()

    def loss(x: Tensor) -> Tensor:
        result: Tensor = encoder(x).sum()
        return result

    compiled = torch.compile(loss, backend=timed.compile, dynamic=False, fullgraph=True)
    taken = []
    for _ in range(_WARMUP + _REPEATS):
        timed.seconds = 0.0
        compiled(tokens).backward()
        taken.append(timed.seconds)
    return statistics.median(taken[_WARMUP:]) / timed.kernels


class _Timed:
    """Inductor, whose compiled graphs take down how long the host is in them.

    Attributes:
        kernels: of all graphs that it has compiled.
        seconds: spent in them.
    """

    def __init__(self) -> None:
        self.kernels = 0.0
        self.seconds = 0.0

    def compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return inductor_compile(gm, inputs, self._compile_part, cached=False)

    def _compile_part(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        self.kernels += sum(issue_seconds(compute_seconds(gm.graph.nodes, _COUNTING), _COUNTING).values())
        run = inductor_compile_inner(gm, inputs, **kwargs)

        def call(args: list[Any]) -> Any:
            start = time.perf_counter()
            results = run(args)
            self.seconds += time.perf_counter() - start
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call
