"""Modules whose parameters are sharded: what reading a parameter, calling and converting them means.

A module's class is replaced by a subclass of the same name, in which each sharded parameter is a property.
Inside a forward the property gives the full parameter; elsewhere (optimizers, initialization, checkpoints)
the sharded one, as ``module.parameters()`` always does.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .casting import cast_tensors
from .ragged.dtensor import RaggedDTensor
from .runtime import courses, eager
from .runtime.agreement import agree_on_buffers
from .runtime.boundary import Binding, binding_of
from .runtime.dbuffer import DBuffer
from .runtime.model import Model
from .storage import convert_buffer
from .torch_internals.autograd import in_backward
from .torch_internals.tracing import runs_before_compilation
from .unaveraged import warn_of_unaveraged_in


@dataclass(frozen=True)
class Access:
    """What reading one sharded parameter depends on; Dynamo guards on the values that the property reads.

    Attributes:
        place: names the layout of the parameter's buffer, and the parameter's index in it.
        buffer: the buffer.
        slot: that index.
    """

    place: str
    buffer: DBuffer
    slot: int

    @staticmethod
    def to(binding: Binding) -> Access:
        return Access(f"{binding.buffer.layout}/{binding.slot}", binding.buffer, binding.slot)

    def __str__(self) -> str:
        """For messages."""
        return f"[rank {self.buffer.rank}] parameter {self.buffer.slots[self.slot].name!r}"


@dataclass
class _Forward:
    """Whether a sharded module's forward is running: a plain flag, because Dynamo must be able to trace it."""

    running: bool = False


in_forward = _Forward()


@dataclass(frozen=True)
class Unit:
    """What makes a module a unit: its own buffers, and the casts that mixed precision asks for at its edge. The module
    that was given to ``fully_shard`` has the casts also where all buffers are those of modules inside."""

    buffers: tuple[DBuffer, ...]
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None

    @property
    def casts(self) -> bool:
        return self.input_dtype is not None or self.output_dtype is not None


class ShardedModule(nn.Module):
    """Mixed into the class of every module that owns sharded parameters, is a unit, or was given to fully_shard."""

    _vescale_access: dict[str, Access]
    _vescale_unit: Unit | None
    _vescale_model: Model | None = None  # whose root it is, or was, if it has been sharded again as a part
    _vescale_methods: tuple[str, ...] = ()  # those that were registered as forwards
    _vescale_dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of its first sharded parameter, and as it is read

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._vescale_unit_forward(super().forward, args, kwargs)

    def _vescale_plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """``forward`` of a module that casts nothing. Most are, and Dynamo takes longer for each function in a call."""
        if torch.compiler.is_compiling() and in_forward.running:
            return super().forward(*args, **kwargs)
        return self._vescale_forward(super().forward, args, kwargs)

    def _vescale_unit_forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._vescale_unit
        if unit is not None and unit.input_dtype is not None:
            args, kwargs = cast_tensors((args, kwargs), unit.input_dtype)
        output = self._vescale_forward(forward, args, kwargs)
        if unit is not None and unit.output_dtype is not None:
            output = cast_tensors(output, unit.output_dtype)
        return output

    def _vescale_forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compiling = torch.compiler.is_compiling()
        if compiling and in_forward.running:
            # Nothing to set, and Dynamo allows no side effect in a checkpointed region.
            return forward(*args, **kwargs)
        was_running = in_forward.running
        in_forward.running = True
        try:
            if compiling:
                return forward(*args, **kwargs)
            around = contextlib.nullcontext() if was_running else self._vescale_outermost()
            with around, eager.gathered_once(buffers_read_by(self)):
                return forward(*args, **kwargs)
        finally:
            in_forward.running = was_running
            if not compiling and isinstance(self, nn.RNNBase):
                # It keeps what it found at its attributes, which would be the gathered unit until its next forward; by
                # what it refers to it sees there, in the same forward of the model maybe, that it is to look again.
                shards = [self._parameters.get(name) for name in self._flat_weights_names]
                self._flat_weights = shards
                self._flat_weight_refs = [None if shard is None else weakref.ref(shard) for shard in shards]

    def _vescale_outermost(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward that is in no other's."""
        if runs_before_compilation():
            raise RuntimeError(
                f"[rank {dist.get_rank()}] a model with sharded parameters is called under torch.compiler.set_stance("
                "'eager_then_compile'), in which Dynamo takes all modules' forwards for one: compile it without"
            )
        buffers = buffers_in(self)
        agree_on_buffers(buffers)
        if any(buffer.mesh.size() > 1 for buffer in buffers):
            warn_of_unaveraged_in(self)
        return courses.forward_of(self, buffers)

    def __setattr__(self, name: str, value: Any) -> None:
        """A forward that is set on the instance gathers and casts as its class's does."""
        if name in ("forward", *self._vescale_methods) and not self._vescale_gathers_in(name, value):
            value = functools.update_wrapper(functools.partial(self._vescale_call, value), value)
        super().__setattr__(name, value)

    def _vescale_gathers_in(self, name: str, value: Any) -> bool:
        """Whether ``value`` does already: what was read here under ``name``, and is put back."""
        method = value.func if isinstance(value, functools.partial) else value
        ours = (getattr(type(self), name), type(self)._vescale_call)
        return isinstance(method, MethodType) and method.__self__ is self and method.__func__ in ours

    def _vescale_call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._vescale_unit_forward(forward, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For ``copy.deepcopy``, as without it; pickling says what to save instead."""
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced  # the class has its own way
        return _new, (_ClassOf(type(self)),), *reduced[2:]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._vescale_model is not None and self._vescale_model.root is None:  # a deep copy, by now of the root too
            self._vescale_model.belongs_to(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuses to replace a sharded parameter by another tensor; tying it to another sharded one is fine."""
        if name in self._vescale_access and param is not None:
            binding = binding_of(param)
            if binding is None:
                raise RuntimeError(
                    f"{self._vescale_access[name]} is sharded, and would be replaced by a tensor that is not. Write "
                    f"its values into it: with torch.no_grad(): module.{name}.copy_(full_tensor), or replace it before "
                    "fully_shard"
                )
            self._vescale_access[name] = Access.to(binding)
        super().register_parameter(name, param)

    def get_parameter(self, target: str) -> nn.Parameter:
        """As ``nn.Module.get_parameter``; inside a forward the full parameter, as reading the attribute gives it."""
        path, _, name = target.rpartition(".")
        if not (torch.compiler.is_compiling() or in_forward.running):
            return super().get_parameter(target)
        owner = self.get_submodule(path)
        return getattr(owner, name) if name in owner._parameters else super().get_parameter(target)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
        replaced = next((access for name, access in self._vescale_access.items() if prefix + name in state_dict), None)
        if local_metadata.get("assign_to_params_buffers") and replaced is not None:
            raise RuntimeError(
                f"{replaced} is sharded, and load_state_dict(assign=True) would take it out of its unit's buffer. "
                "Leave assign out; call to_empty first if the module is on the meta device"
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; with ``set_to_none=False`` one kernel for each unit, not for each parameter.

        Also forgets gradients of the module's parameters that ``no_sync`` accumulated and no reduction has taken.
        """
        if set_to_none:
            super().zero_grad()
        else:
            _zero_together([param.grad for param in self.parameters() if param.grad is not None])
        params = set(self.parameters())
        for buffer in buffers_in(self):
            buffer.forget_gradients(params)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """``to``, ``half``, ``to_empty`` and the like: on the flat shard, of which parameters are views."""
        sharded = {name: p for name, p in self._parameters.items() if isinstance(p, RaggedDTensor)}
        with _converting.all_of(self):
            self._parameters.update(dict.fromkeys(sharded))
            try:
                super()._apply(fn, recurse)
            finally:
                self._parameters.update(sharded)
            for param in sharded.values():
                convert_buffer(cast(RaggedDTensor, param), fn, _converting.params)
        if isinstance(self, nn.RNNBase):
            self._init_flat_weights()  # it has looked for its parameters meanwhile
        return self


@dataclass(frozen=True)
class _ClassOf:
    """The class of a sharded module, which only this process has."""

    made: type[nn.Module]

    def __deepcopy__(self, memo: dict[int, Any]) -> _ClassOf:
        return self

    def __reduce__(self) -> Any:
        raise RuntimeError(
            f"a sharded {self.made.__name__} can't be pickled, or saved whole: it is a part of what runs on all ranks. "
            "Save its state_dict() on every rank by torch.distributed.checkpoint, or the whole tensors that "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict gives with full_state_dict=True"
        )


def _new(of: _ClassOf) -> nn.Module:
    return of.made.__new__(of.made)


class _Converting:
    """The parameters of the outermost module that is being converted, of which the others are parts."""

    def __init__(self) -> None:
        self.params: set[Tensor] = set()

    @contextlib.contextmanager
    def all_of(self, module: nn.Module) -> Iterator[None]:
        if self.params:
            yield
            return
        self.params = set(module.parameters())
        try:
            yield
        finally:
            self.params = set()


_converting = _Converting()


def reads_are_gathered() -> bool:
    """Whether reading a sharded parameter as an attribute gives the full one. In a backward a checkpointed function
    runs again, and not every such function is a module's forward."""
    return torch.compiler.is_compiling() or in_forward.running or in_backward()


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was called on, of what it returned; any other as it is."""
    return module._orig_mod if isinstance(module, torch._dynamo.OptimizedModule) else module


def unit_of(module: nn.Module) -> Unit | None:
    """What ``fully_shard`` made of the module itself; None if it only holds parameters of units, or none."""
    return module._vescale_unit if isinstance(module, ShardedModule) else None


def buffers_read_by(module: ShardedModule) -> list[DBuffer]:
    """Buffers that the module's forward reads: those of its own parameters and, if it is a unit, its unit's."""
    own = [access.buffer for access in module._vescale_access.values()]
    unit = module._vescale_unit.buffers if module._vescale_unit is not None else ()
    return list(dict.fromkeys([*unit, *own]))


def buffers_in(module: nn.Module) -> list[DBuffer]:
    """Buffers of all units in the module, and those that its parts read besides."""
    parts = [part for part in module.modules() if isinstance(part, ShardedModule)]
    return list(dict.fromkeys(buffer for part in parts for buffer in buffers_read_by(part)))


@torch.no_grad()
def _zero_together(grads: list[Tensor]) -> None:
    for grad in grads:
        if grad.grad_fn is not None:
            grad.detach_()
        else:
            grad.requires_grad_(False)
    if grads:
        torch._foreach_zero_(grads)
