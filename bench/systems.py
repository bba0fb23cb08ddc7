"""The systems under comparison, each one function: take a model, return its forward, distributed.

All of them train the same module, built from the same seed, with the same optimizer on ``model.parameters()``.
Each is set up as its own documentation recommends, and on CPUs, where FSDP2 would not overlap and Inductor's newer
passes can't run, with what overlap it can have there. Those that form units form every decoder layer, and the rest
(embedding, last norm, output projection); ours gathers the parts of a layer apart, except as ``vescale-whole-blocks``,
and compiles the whole model, except as ``vescale-layers``, which compiles each layer by itself, as FSDP2 does.

Of a step's micro-batches the last one communicates gradients; SimpleFSDP, which has no such mode, does so for each.
FSDP2 gathers parameters that it keeps once a step, ours for each micro-batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from communication import communication_alone
from over_messages import simple_fsdp_over_messages
from simple_fsdp import simple_fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workload import Forward, Policy, Workload

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.report import GraphReport


@dataclass(frozen=True)
class System:
    """One way to train a model on several ranks.

    Attributes:
        distribute: called on every rank after ``init_process_group`` with a model from
            ``Workload.build_model``. May replace the model's parameters in place.
        policies: under which it can run; each is measured for itself.
        family: systems of one family are configurations of one, of which the fastest counts.
        reduces: whether ranks train one model together. One that does not is a yardstick, whose results differ.
        rounds: whether what it sends is rounded, so that its results differ too.
        fakes: whether it runs on a process group whose collectives send nothing.
        accumulating: around a micro-batch that is not the step's last: given the forward, the model and the policy.
            None for a yardstick that knows steps of one alone.
        planned_bytes: of its forward: what it said that a step will take on a rank, optimizer states apart.
        default: whether it is measured when no systems are named.
    """

    name: str
    distribute: Callable[[nn.Module, Workload, Policy], Forward]
    policies: tuple[Policy, ...]
    family: str | None = None
    reduces: bool = True
    rounds: bool = False
    fakes: bool = True
    accumulating: Callable[[Any, nn.Module, Policy], AbstractContextManager[None]] | None = lambda *_: nullcontext()
    planned_bytes: Callable[[Any], int] | None = None
    default: bool = True


SHARDED = (Policy.RESHARD, Policy.KEEP)


def _alone(model: nn.Module, workload: Workload, policy: Policy) -> Forward:
    return _Autocast(torch.compile(model, dynamic=False, fullgraph=True), workload)


def _ddp(model: nn.Module, workload: Workload, policy: Policy, *, compiled: bool) -> Forward:
    # Gradients as views of the buckets: without it DDP holds every gradient twice.
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _Autocast(torch.compile(replica, dynamic=False) if compiled else replica, workload)


@dataclass(frozen=True)
class _Autocast:
    run: Any
    workload: Workload

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.workload.device, torch.bfloat16, enabled=self.workload.dtype == "bf16"):
            return self.run(tokens, labels)


def _fsdp2(model: nn.Module, workload: Workload, policy: Policy, *, compiled: bool) -> Forward:
    layers = list(model.get_submodule("layers").children())
    for layer in layers:
        if compiled:
            layer.compile(dynamic=False)
        fully_shard(layer, reshard_after_forward=policy is Policy.RESHARD, mp_policy=workload.mixed_precision)
    # None is FSDP2's default for the root: the backward needs its parameters at once, so they are kept.
    fully_shard(
        model,
        reshard_after_forward=None if policy is Policy.RESHARD else False,
        mp_policy=workload.mixed_precision,
    )
    if workload.device == "cpu":
        _prefetch(model, layers)
    return model


@contextmanager
def _fsdp2_accumulates(run: Forward, model: Any, policy: Policy) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(policy is Policy.RESHARD)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


def _prefetch(model: nn.Module, layers: list[nn.Module]) -> None:
    """Gathers one layer ahead. On GPUs FSDP2 does by itself, by streams, which CPUs have none of."""
    forwards: Any = [model, *layers]
    backwards: Any = [model, *reversed(layers)]
    for unit, following in itertools.pairwise(forwards):
        unit.set_modules_to_forward_prefetch([following])
    for unit, following in itertools.pairwise(backwards):
        unit.set_modules_to_backward_prefetch([following])
    for unit in forwards:
        unit._set_unshard_async_op(True)  # its docstring asks for explicit prefetching


class _Ours:
    """A model compiled by the backend that is measured, and what the compiler said of its graphs."""

    def __init__(
        self,
        model: nn.Module,
        workload: Workload,
        policy: Policy,
        *,
        lowering: str,
        whole_blocks: bool,
        by_layer: bool,
        quantizer: vc.BlockInt8 | None,
    ) -> None:
        for part in [*(model.get_submodule("layers").children() if whole_blocks else ()), model]:
            vc.fully_shard(
                part,
                reshard_after_forward=policy is Policy.RESHARD,
                mp_policy=workload.mixed_precision,
                quantize=quantizer,
                quantize_gradients=quantizer,
            )
        self.graphs: list[GraphReport] = []
        backend = functools.partial(vescale, options={"lowering": lowering}, on_compiled=self.graphs.append)
        self.call = model if by_layer else torch.compile(model, backend=backend, dynamic=False)
        for layer in model.get_submodule("layers").children() if by_layer else ():
            layer.compile(backend=backend, dynamic=False)

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.call(tokens, labels)

    def planned_bytes(self) -> int:
        return max(graph.peak_bytes for graph in self.graphs)


def _ours(
    name: str,
    lowering: str = "inductor",
    *,
    whole_blocks: bool = False,
    by_layer: bool = False,
    quantizer: vc.BlockInt8 | None = None,
    default: bool = False,
) -> System:
    distribute = functools.partial(
        _Ours, lowering=lowering, whole_blocks=whole_blocks, by_layer=by_layer, quantizer=quantizer
    )
    rounds = quantizer is not None
    planned = None if by_layer else _Ours.planned_bytes  # what is in no layer is in no plan
    return System(
        name,
        distribute,
        SHARDED,
        rounds=rounds,
        accumulating=lambda run, model, policy: vc.no_sync(model),
        planned_bytes=planned,
        default=default,
    )


def _ddp_system(name: str, *, compiled: bool) -> System:
    def accumulating(forward: _Autocast, model: nn.Module, policy: Policy) -> AbstractContextManager[None]:
        return forward.run.no_sync()

    distribute = functools.partial(_ddp, compiled=compiled)
    return System(name, distribute, (Policy.REPLICATED,), fakes=False, accumulating=accumulating)


def _fsdp2_system(name: str, *, compiled: bool) -> System:
    return System(name, functools.partial(_fsdp2, compiled=compiled), SHARDED, accumulating=_fsdp2_accumulates)


OURS = "vescale"

SYSTEMS = {
    system.name: system
    for system in (
        System("compute-alone", _alone, (Policy.REPLICATED,), reduces=False),
        System("communication-alone", communication_alone, SHARDED, reduces=False, accumulating=None),
        _ddp_system("ddp", compiled=False),
        _ddp_system("ddp-compile", compiled=True),
        _fsdp2_system("fsdp2", compiled=False),
        _fsdp2_system("fsdp2-compile", compiled=True),
        System("simplefsdp", functools.partial(simple_fsdp, bucketed=False), SHARDED, family="simplefsdp"),
        System("simplefsdp-bucketed", functools.partial(simple_fsdp, bucketed=True), SHARDED, family="simplefsdp"),
        System("simplefsdp-over-our-messages", simple_fsdp_over_messages, SHARDED, fakes=False, default=False),
        _ours(OURS, default=True),
        _ours("vescale-whole-blocks", whole_blocks=True),
        _ours("vescale-layers", by_layer=True),
        _ours("vescale-int8", quantizer=vc.BlockInt8()),
        _ours("vescale-eager-lowering", "eager"),
    )
}
