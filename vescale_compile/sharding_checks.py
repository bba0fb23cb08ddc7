"""What ``fully_shard`` reads of its arguments, and refuses, before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parameter import is_lazy

from .mesh import DataParallelMesh, whole_mesh
from .planner import Granularity
from .quantize import BlockInt8, BlockQuantizer
from .ragged.dtensor import RaggedDTensor
from .runtime.life import ranks_of
from .sharded_module import unit_of
from .torch_internals.tracing import is_shape

GranularityFn = Callable[[str, nn.Parameter], Granularity | None]
QuantizerFn = Callable[[str, nn.Parameter], BlockQuantizer | None]
GradientQuantizerFn = Callable[[str, nn.Parameter], BlockInt8 | None]

_NOT_BY_NCCL = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu})
"""Besides complex ones. Of what is narrower than a byte there are no parameters."""


def check_arguments(module: object, reshard_after_forward: object, mp_policy: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard: module is {type(module).__name__}; give an nn.Module (instead of several, which FSDP2 would "
            "gather together, the one around them: what no unit has is gathered where it is read)"
        )
    for name, part in module.named_modules():
        if isinstance(part, torch._dynamo.OptimizedModule):
            raise RuntimeError(
                f"fully_shard: {name or 'the module'} is what torch.compile returned. Call fully_shard first, then "
                "torch.compile; or compile in place, as module.compile(backend='vescale'), before or after."
            )
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"fully_shard: {name or 'the module'} is a DistributedDataParallel, which keeps all parameters whole. "
                "Leave it out, and give the module that it wraps: gradients are averaged without it."
            )
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"fully_shard: a {type(module).__name__} has no forward, so nothing says when its parameters are "
            "needed. Call fully_shard on each of its elements."
        )
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(f"fully_shard: reshard_after_forward is {reshard_after_forward!r}; give True or False")
    if not isinstance(mp_policy, MixedPrecisionPolicy | None):
        raise TypeError(f"fully_shard: mp_policy is {mp_policy!r}; give vc.MixedPrecisionPolicy(param_dtype=...)")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name, None)
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1)):
            raise TypeError(
                f"fully_shard: mp_policy has {name}={dtype!r}; give a floating-point dtype of 16 bits or more, as "
                "torch.bfloat16, or None. For fewer bits on the wire there are quantize= and quantize_gradients="
            )


def ignored_in(params: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    """Those given may be of other modules too: one set will do for all calls."""
    given: list[object] = [params] if isinstance(params, Tensor | str) else list(params or ())
    if unfit := [each for each in given if each is params or not isinstance(each, nn.Parameter)]:
        found = f"a {type(params).__name__}" if isinstance(params, Tensor) else repr(unfit[0])
        raise TypeError(
            f"fully_shard: ignored_params has {found}; give a set of parameters, as {{model.head.weight}} or "
            "set(model.head.parameters())"
        )
    return {each for each in given if isinstance(each, nn.Parameter)}


def granularities_in(granularity: object) -> tuple[GranularityFn, ...]:
    """The callables that were given, one, several or none."""
    if granularity is None:
        return ()
    given = tuple(granularity) if isinstance(granularity, list | tuple) else (granularity,)
    for each in given:
        if isinstance(each, type) or not callable(each):  # an optimizer's class would be built with a name
            raise TypeError(
                f"fully_shard: granularity is {granularity!r}; give a function of a parameter's name and the "
                "parameter, as vc.optim.AdamW8bit.granularity or lambda name, param: vc.Rows(32), or a list of them"
            )
    return cast(tuple[GranularityFn, ...], given)


def check_one_device(module: nn.Module, mesh: DataParallelMesh, ignored: set[nn.Parameter]) -> None:
    params = [(name, param) for name, param in module.named_parameters() if param not in ignored and not param.is_meta]
    for name, param in params:
        first, there = params[0]
        if param.device != there.device:
            raise ValueError(
                f"{mesh.where}fully_shard: parameter {name!r} is on {param.device}, and {first!r} on {there.device}. A "
                "rank has one device: move the model to it"
            )


def check_params(module: nn.Module, mesh: DataParallelMesh, ignored: set[nn.Parameter]) -> None:
    if unit_of(module) is not None:
        raise ValueError(
            f"{mesh.where}fully_shard: this {type(module).__name__} is a unit already. "
            "fully_shard a module once, and modules that are to be units of their own before those that they are in"
        )
    _check_parts(module, mesh, ignored)
    for name, param in module.named_parameters():
        if param in ignored:
            continue
        where = f"{mesh.where}fully_shard: parameter {name!r} "
        if isinstance(param, RaggedDTensor):
            present = whole_mesh(param)
            if present != mesh.whole and ranks_of(present) != ranks_of(mesh.whole):
                raise ValueError(
                    f"{where}is sharded over {present} already, and {mesh.whole} is of other ranks, over which its "
                    "gradients would not be averaged. Give meshes of the same ranks, such as mesh['replicate', 'shard']"
                    ", whose first dimension replicates; or, if that is meant, pass it in ignored_params"
                )
        elif isinstance(param, torch.distributed.tensor.DTensor):
            raise ValueError(f"{where}is a DTensor ({param.placements}) already; shard plain parameters")
        elif is_lazy(param):
            raise ValueError(f"{where}is lazy: it has no shape yet. Run a forward once before fully_shard")
        elif not is_shape(param) and _has_operations_of_its_own(param):
            raise ValueError(
                f"{where}is a {type(param).__name__}, whose operations are its own, as those of quantized weights are; "
                "its shards would be plain tensors of what it stands for. Pass it in ignored_params, or shard a plain "
                "tensor in its place"
            )
        elif not param.is_meta and param.device.type != mesh.shard.device_type:
            raise ValueError(f"{where}is on {param.device}, the mesh on {mesh.shard.device_type}: move one of them")
        elif param.is_complex() and mesh.device_type != "cpu":
            raise ValueError(
                f"{where}is complex, and NCCL takes no complex numbers. Hold its real view as the parameter "
                "(torch.view_as_real), or pass it in ignored_params"
            )
        elif param.dtype in _NOT_BY_NCCL and mesh.device_type != "cpu":
            raise ValueError(
                f"{where}is {param.dtype}, which NCCL does not send: hold it as torch.int32 or torch.uint8, or pass it "
                "in ignored_params"
            )
        elif param.numel() == 0:
            raise ValueError(f"{where}of shape {tuple(param.shape)} has no elements: pass it in ignored_params")
        else:
            _check_nothing_is_lost(param, where)


def _has_operations_of_its_own(param: nn.Parameter) -> bool:
    """Whether its class says what PyTorch's operations do with it."""
    functions, *usual = (
        getattr(kind.__torch_function__, "__func__", kind.__torch_function__)  # of a class method
        for kind in (type(param), Tensor, nn.Parameter)
    )
    return functions not in usual or type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _check_nothing_is_lost(param: nn.Parameter, where: str) -> None:
    """The sharded parameter is another tensor, and a gradient or a hook of the whole one means nothing there."""
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(f"{where}has gradient hooks, which would never be called. Register them after fully_shard")
    if param.grad is not None:
        raise ValueError(f"{where}has a gradient, which would be lost. Set grad to None before fully_shard")


def _check_parts(module: nn.Module, mesh: DataParallelMesh, ignored: set[nn.Parameter]) -> None:
    for name, part in module.named_modules():
        where = f"{mesh.where}fully_shard: {name or 'the module'} "
        own = [param for param in part.parameters(recurse=False) if param not in ignored]
        if own and isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"{where}is a torch.jit.ScriptModule, whose code reads its parameters where they are. Give the module "
                "that it was made from, or pass its parameters in ignored_params, and average their gradients "
                "among all ranks yourself"
            )
        sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if sparse and any(param.requires_grad for param in own):
            raise ValueError(
                f"{where}has sparse gradients, and those of a unit are one dense buffer: make it without sparse=True, "
                f"set {f'{name}.' if name else ''}sparse = False, or pass its weight in ignored_params, "
                "and average its gradients among all ranks yourself"
            )


def check_quantizers(quantize: object, quantize_gradients: object) -> None:
    """Raises TypeError or ValueError if ``fully_shard`` can't take these arguments of the same names. What functions
    give is checked where they are called."""
    for_all = (None if _is_function(each) else each for each in (quantize, quantize_gradients))
    _check_quantizers(*for_all, where="fully_shard")


def quantizers_of(
    quantize: BlockQuantizer | QuantizerFn | None,
    quantize_gradients: BlockInt8 | GradientQuantizerFn | None,
    name: str,
    parameter: nn.Parameter,
    where: str,
) -> tuple[BlockQuantizer | None, BlockInt8 | None]:
    """How a parameter and its gradient travel, as ``fully_shard``'s arguments of the same names say; None for as they
    are.

    Raises:
        TypeError, ValueError: a function gave something else; ``where`` begins the message.
    """
    chosen = (
        quantize(name, parameter) if callable(quantize) else quantize,
        quantize_gradients(name, parameter) if callable(quantize_gradients) else quantize_gradients,
    )
    _check_quantizers(*chosen, where=f"{where}fully_shard: parameter {name!r}")
    return chosen


def _is_function(given: object) -> bool:
    return callable(given) and not isinstance(given, type)  # a quantizer's class would be built with a name


def _check_quantizers(quantize: object, quantize_gradients: object, *, where: str) -> None:
    if quantize is not None and not isinstance(quantize, BlockQuantizer):
        raise TypeError(
            f"{where}: quantize is {quantize!r}; give vc.BlockFP8(tile=(128, 128)), vc.BlockInt8(block=256), "
            "vc.MXFP8() or None, for all parameters or by a function of a parameter's name and the parameter"
        )
    if isinstance(quantize, BlockInt8) and quantize.seed is not None:
        raise ValueError(
            f"{where}: quantize={quantize!r} has a seed, but parameters are rounded to the nearest. Leave it out "
            "here; in quantize_gradients it is that of stochastic rounding"
        )
    if quantize_gradients is not None and not isinstance(quantize_gradients, BlockInt8):
        raise TypeError(
            f"{where}: quantize_gradients is {quantize_gradients!r}; give vc.BlockInt8(block=256) or None, for all "
            "parameters or by a function of a parameter's name and the parameter"
        )
