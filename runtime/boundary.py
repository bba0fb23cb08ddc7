"""Between sharded parameters and graphs: parameters become one flat input, its gradient becomes theirs.

Both directions are views. The forward hands out the unit's shard itself; the backward cuts the flat gradient
[S] where the parameters' shards lie and wraps each piece like its parameter. A gradient whose reduction the graph left
in flight is waited for when it is first read.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_internals.autograd import in_backward
from .arrivals import Arrival, arrival_of
from .backwards import running_backward
from .dbuffer import DBuffer, Peers
from .model import Forward
from .unshard import reduce_scatter
from .used import alike_on_all_ranks, used_on_any_rank


class Binding(NamedTuple):
    """What a sharded parameter knows of its buffer: kept on the tensor as ``_vescale_binding``."""

    buffer: DBuffer
    slot: int  # index in ``buffer.slots``

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        return Binding(copy.deepcopy(self.buffer, memo), self.slot)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a saved parameter is a tensor of its own


class ShardedParameter(Protocol):
    """What this module needs of a sharded parameter; RaggedDTensor has it."""

    _vescale_binding: Binding

    def with_local(self, local: Tensor) -> Tensor: ...
    def with_arriving(self, local: Tensor, arrival: Arrival) -> Tensor: ...


def binding_of(tensor: object) -> Binding | None:
    """The binding of a sharded parameter; None for any other object, fake tensors included."""
    return getattr(tensor, "_vescale_binding", None)


def bound(param: Tensor) -> Binding:
    """The binding of a sharded parameter that a module reads.

    Raises:
        RuntimeError: the tensor is not the parameter that ``fully_shard`` made.
    """
    binding = binding_of(param)
    if binding is None:
        raise RuntimeError(
            f"a module reads {param!r} as its parameter, but fully_shard did not make it: it was put in the "
            "parameter's place. Write new values into the parameter (param.copy_(...), load_state_dict without "
            "assign=True), or pass full tensors to torch.func.functional_call"
        )
    return binding


def flat_input(
    buffer: DBuffer,
    params: Sequence[Tensor],
    *,
    used: Collection[int],
    forward: Forward,
) -> Tensor:
    """Returns the unit's shard [S], to which the gradients of ``params`` will come back, reduced.

    Args:
        buffer: the unit's buffer.
        params: parameters of that buffer, in any order.
        used: indices of the parameters that have a gradient, read when the backward has computed them.
        forward: what reads the parameters.
    """
    if in_backward():
        running_backward()  # what is computed again here may be followed by a backward of its own
    trainable = tuple(p for p in params if p.requires_grad)
    if not (torch.is_grad_enabled() and trainable):
        return buffer.shard
    trained = frozenset(index for index, param in enumerate(buffer.params) if param.requires_grad)
    alike = forward.compiled and alike_on_all_ranks(buffer.layout, trained)
    if buffer.sync.accumulates:
        buffer.reductions.read(trained)
    return _FlatInput.apply(buffer, buffer.sync.enabled, used, forward, trained, alike, *trainable)


class _FlatInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffer: DBuffer,
        reduces: bool,
        used: Collection[int],
        forward: Forward,
        trained: frozenset[int],
        alike: bool,
        *params: ShardedParameter,
    ) -> Tensor:
        ctx.buffer, ctx.reduces = buffer, reduces
        ctx.used, ctx.forward, ctx.trained, ctx.alike = used, forward, trained, alike
        ctx.params = params
        ctx.set_materialize_grads(False)
        return buffer.shard.view_as(buffer.shard)

    @staticmethod
    @torch.compiler.disable  # where a program compiles what calls backward, Dynamo looks at all that this runs
    @once_differentiable  # a second derivative would lack what the reduction does
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        buffer: DBuffer = ctx.buffer
        params: tuple[ShardedParameter, ...] = ctx.params
        ctx.forward.end()
        backward = running_backward()
        if ctx.reduces and buffer.sync.accumulates:
            peers = buffer.sync.peers
            backward.at_end(peers, functools.partial(_reduce_left, peers))
        if grad is not None and not ctx.reduces:
            buffer.reductions.held(set(ctx.used), alike=ctx.alike)
        if grad is None or not ctx.reduces:
            return (None,) * (6 + len(params))
        owed = _owed(buffer, set(ctx.used), trained=ctx.trained, alike=ctx.alike)
        _set_aside(buffer, grad, owed - {p._vescale_binding.slot for p in params})
        earlier = backward.aside.get(buffer, {})
        local = (_all_there_is(p, grad, earlier) if p._vescale_binding.slot in owed else None for p in params)
        return None, None, None, None, None, None, *local


def _owed(buffer: DBuffer, used: set[int], *, trained: frozenset[int], alike: bool) -> set[int]:
    """Indices of the parameters that a reduction has gradients of: those ``used`` here, or on another rank, or before,
    where gradients accumulate, also of what is frozen by now."""
    earlier, earlier_alike = buffer.reductions.sent()
    if buffer.sync.accumulates:
        trained = frozenset(range(len(buffer.params)))
    return used_on_any_rank(buffer, used | earlier, trained=trained, alike=alike and earlier_alike)


def _reduce_left(peers: Peers) -> None:
    """Reduces what accumulated for units that the last micro-batch did not use, or after their own reductions, where
    one backward runs through forwards inside and outside ``no_sync``."""
    for buffer in peers.buffers():
        if buffer.sync.enabled and (total := buffer.reductions.take()) is not None:
            reduced = reduce_scatter(total, buffer.reductions_handle, buffer.comm(buffer.number)).to(buffer.shard.dtype)
            _set_aside(buffer, reduced, _owed(buffer, set(), trained=frozenset(), alike=True))


def _local_grad(param: ShardedParameter, flat_grad: Tensor) -> Tensor:
    buffer, index = param._vescale_binding
    local, arrival = buffer.local(flat_grad, index), arrival_of(flat_grad)
    return param.with_local(local) if arrival is None else param.with_arriving(local, arrival)


def _all_there_is(param: ShardedParameter, flat_grad: Tensor, aside: dict[int, Tensor]) -> Tensor:
    """A parameter's gradient, and what was set aside of it."""
    earlier = aside.pop(param._vescale_binding.slot, None)
    own = _local_grad(param, flat_grad)
    return own if earlier is None else earlier + own


def _set_aside(buffer: DBuffer, flat_grad: Tensor, indices: set[int]) -> None:
    """Gradients of parameters that earlier micro-batches used, or another rank, and not what this backward has run
    through so far. If it comes to them, they are added to what autograd then gives them; else they are given apart."""
    if not indices:
        return
    backward = running_backward()
    aside = backward.aside.setdefault(buffer, {})
    backward.at_end(buffer, functools.partial(_give, buffer, aside))
    for index in indices:
        grad = _local_grad(cast(ShardedParameter, buffer.params[index]), flat_grad)
        aside[index] = aside[index] + grad if index in aside else grad


def _give(buffer: DBuffer, grads: dict[int, Tensor]) -> None:
    """Adds to ``.grad`` as autograd does, hooks included; parameters that are frozen by now have no hooks."""
    given = [(buffer.params[index], grads[index]) for index in sorted(grads)]
    grads.clear()
    for param, grad in given:
        if param.requires_grad:
            torch.autograd.backward(param, grad)
        else:
            param.grad = grad if param.grad is None else param.grad + grad
