"""The class that a sharded module is given: of the same name, with a property for each sharded parameter."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from .ragged.dtensor import RaggedDTensor
from .runtime.boundary import binding_of
from .runtime.marker import unshard_param
from .sharded_module import Access, ShardedModule, Unit, reads_are_gathered, uncompiled
from .torch_internals.tracing import never_start_tracing_at


def make_sharded(module: nn.Module, access: dict[str, Access], unit: Unit | None) -> None:
    """Gives ``module`` the class that reads the parameters named in ``access`` as sharded ones."""
    if isinstance(module, ShardedModule):
        module._vescale_access.update(access)
        module._vescale_unit = unit or module._vescale_unit
        _choose_class(module)
    else:
        module.__dict__["_vescale_access"] = dict(access)
        module.__dict__["_vescale_unit"] = unit
        _choose_class(module)
        _set_again(module, "forward")


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Has a method of a sharded module gather and read its parameters as the module's forward does.

    As ``torch.distributed.fsdp.register_fsdp_forward_method``. Call it after ``fully_shard``, on every rank, for each
    method that is called from outside a forward, as ``encode`` of an autoencoder.

    Args:
        module: given to ``fully_shard``, or a part of it that has parameters of its own; compiled or not.
        method_name: of its class.

    Raises:
        ValueError: the module is not sharded, or has no such method.
    """
    module = uncompiled(module)
    if not isinstance(module, ShardedModule):
        raise ValueError(
            f"register_forward_method: this {type(module).__name__} is not sharded: call fully_shard first, and give "
            "the module that it was called on, or one with parameters of its own"
        )
    if not callable(getattr(type(module), method_name, None)):
        raise ValueError(f"register_forward_method: {type(module).__name__} has no method {method_name!r}")
    if method_name not in ("forward", *module._vescale_methods):
        module._vescale_methods += (method_name,)
        _choose_class(module)
        _set_again(module, method_name)


def note_dtypes(module: nn.Module) -> None:
    """For modules in it that say of which dtype their parameters are, as those of transformers and diffusers do: that
    of the first, as it is stored and as it is read in a forward."""
    for part in module.modules():
        if _said_dtype(type(part)) is None:
            continue
        first = next((param for param in part.parameters() if param.is_floating_point()), None)
        binding = binding_of(first) if first is not None else None
        if binding is not None and binding.buffer.param_dtype != binding.buffer.shard.dtype:
            make_sharded(part, {}, None)
            cast(ShardedModule, part)._vescale_dtypes = binding.buffer.shard.dtype, binding.buffer.param_dtype


def _said_dtype(cls: type[nn.Module]) -> property | None:
    found = inspect.getattr_static(cls, "dtype", None)
    return found if isinstance(found, property) else None


def _choose_class(module: nn.Module) -> None:
    names, methods = tuple(vars(module)["_vescale_access"]), vars(module).get("_vescale_methods", ())
    unit: Unit | None = vars(module)["_vescale_unit"]
    casts = unit is not None and unit.casts
    original = next(cls for cls in type(module).__mro__ if not issubclass(cls, ShardedModule))
    module.__class__ = _sharded_class(cast(type[nn.Module], original), names, methods, casts)  # type: ignore[arg-type]


def _set_again(module: nn.Module, method_name: str) -> None:
    """If it was set on the instance, as the sharded class sets it."""
    if method_name in vars(module):
        setattr(module, method_name, vars(module)[method_name])


@functools.cache
def _sharded_class(
    original: type[nn.Module], names: tuple[str, ...], methods: tuple[str, ...], casts: bool
) -> type[nn.Module]:
    """One class for all modules alike, so that Dynamo's code and guards serve every layer.

    It keeps the name of the original class: libraries decide by it.
    """
    body: dict[str, Any] = {name: property(_reader(name), _refusal_to_write(name)) for name in names}
    body["__module__"], body["__qualname__"] = original.__module__, original.__qualname__
    body["__doc__"] = original.__doc__
    called = {
        name: getattr(ShardedModule, name) for name in ("_vescale_call", "_vescale_unit_forward", "_vescale_forward")
    }
    called["forward"] = ShardedModule.forward if casts else ShardedModule._vescale_plain_forward
    called |= {name: _like_forward(getattr(original, name)) for name in methods}
    body |= {name: _with_code_of_its_own(method, name, original) for name, method in called.items()}
    body["__new__"], body["__init__"] = _unsharded(original)
    for name in ("__new__", "__init__", "forward", *methods):
        like = getattr(original, name if name != "__new__" else "__init__")
        with contextlib.suppress(TypeError, ValueError):  # of what is written in C, say
            body[name].__signature__ = inspect.signature(like)  # libraries pass what it names
    if issubclass(original, nn.RNNBase):
        body["flatten_parameters"] = _leave_in_place
    if issubclass(original, nn.ParameterList):
        body["__getitem__"] = _item_or_list(original.__getitem__)
    if issubclass(original, nn.ParameterDict):
        body["copy"] = _copy_or_dict(original.copy)
    if (said := _said_dtype(original)) is not None:
        body["dtype"] = said.getter(_dtype_as_read(said))
    if "state_dict" in _arguments_of(getattr(original, "save_pretrained", None)):
        body["save_pretrained"] = _only_whole(original.save_pretrained)  # type: ignore[attr-defined]
    return type(original.__name__, (ShardedModule, original), body)


def _like_forward(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        return self._vescale_unit_forward(functools.partial(method, self), args, kwargs)

    return run


def _with_code_of_its_own(method: Callable[..., Any], name: str, original: type[nn.Module]) -> Callable[..., Any]:
    """For Dynamo, whose recompile limit is that of a code object: all sharded classes would share one."""
    function = cast(FunctionType, method)
    code = function.__code__.replace(co_name=name, co_qualname=f"{original.__qualname__}.{name}")
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _unsharded(original: type[nn.Module]) -> tuple[Callable[..., nn.Module], Callable[..., None]]:
    """``__new__`` and ``__init__``: to call the class, as a slice of ``nn.Sequential`` does, makes a module of the
    original one. What ``__new__`` alone has made is of the class that it was called on: copies begin so."""

    def new(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        # Dynamo knows no object that changes its class, and itself makes some with no arguments.
        if torch.compiler.is_compiling() and (args or kwargs):
            return original(*args, **kwargs)
        found = cast(Callable[..., nn.Module], original.__new__)
        return object.__new__(cls) if found is object.__new__ else found(cls, *args, **kwargs)

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if "_vescale_access" not in vars(module):  # of one that has it, parameters say that nothing replaces them
            module.__class__ = original
        original.__init__(module, *args, **kwargs)

    return new, init


def _item_or_list(item: Callable[..., Any]) -> Callable[..., Any]:
    """A slice of an ``nn.ParameterList`` is a list in a forward: another one would make new parameters of what was
    gathered, and keep their gradients."""

    def run(params: nn.ParameterList, index: Any) -> Any:
        if isinstance(index, slice) and reads_are_gathered():
            return [params[each] for each in range(len(params))[index]]
        return item(params, index)

    return run


def _copy_or_dict(copy: Callable[..., Any]) -> Callable[..., Any]:
    """So it is with a copy of an ``nn.ParameterDict``, of which its ``|`` makes one."""

    def run(params: nn.ParameterDict) -> Any:
        return dict(params.items()) if reads_are_gathered() else copy(params)

    return run


def _leave_in_place(rnn: nn.RNNBase) -> None:
    """In the place of ``flatten_parameters``, which would move gathered weights to memory of cuDNN's."""


def _arguments_of(method: object) -> Iterable[str]:
    return inspect.signature(method).parameters if callable(method) else ()


def _only_whole(save: Callable[..., Any]) -> Callable[..., Any]:
    """Hugging Face's ``save_pretrained`` takes shards for weights that are tied wrongly, and names a cure of that."""

    @functools.wraps(save)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(save).bind(module, *args, **kwargs).arguments.get("state_dict")
        state: Mapping[str, object] = dict(module.named_parameters()) if given is None else given
        sharded = next((name for name, value in state.items() if isinstance(value, RaggedDTensor)), None)
        if sharded is not None:
            raise RuntimeError(
                f"[rank {dist.get_rank()}] save_pretrained of {type(module).__name__}: parameter {sharded!r} is "
                "sharded. Pass whole ones, of torch.distributed.checkpoint.state_dict, called on all ranks: state_dict="
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
            )
        return save(module, *args, **kwargs)

    return run


def _dtype_as_read(said: property) -> Callable[[ShardedModule], torch.dtype]:
    """In a forward that in which parameters are read there, because models cast their inputs to it."""
    stored_dtype = said.fget
    assert stored_dtype is not None

    def dtype(module: ShardedModule) -> torch.dtype:
        stored = stored_dtype(module)
        if module._vescale_dtypes is not None and reads_are_gathered():
            return module._vescale_dtypes[1] if stored == module._vescale_dtypes[0] else stored
        return stored

    return dtype


def anything_sharded() -> bool:
    """Whether this process ever sharded a module."""
    return _sharded_class.cache_info().currsize > 0


def _reader(name: str) -> Callable[[ShardedModule], Any]:
    def read(module: ShardedModule) -> Any:
        try:  # to ask whether it is there has Dynamo guard that too, for longer than all else it does of a read
            param = module._parameters[name]
        except KeyError:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}") from None
        if not isinstance(param, RaggedDTensor):
            return param  # None, or another tensor put in its place (torch.func.functional_call)
        if reads_are_gathered():
            access = module._vescale_access[name]
            buffer = access.buffer
            return unshard_param(param, access.place, buffer.sync.accumulates, buffer.param_dtype)
        return param

    never_start_tracing_at(read)
    return read


def _refusal_to_write(name: str) -> Callable[[ShardedModule, object], None]:
    """Comes to be called where the parameter was taken out of the module before, as ``torch.nn.utils.prune`` does."""

    def write(module: ShardedModule, value: object) -> None:
        raise RuntimeError(
            f"{module._vescale_access[name]} is sharded, and would be replaced by a plain attribute. Prune, normalize "
            "or replace parameters before fully_shard"
        )

    return write
