"""``fully_shard``: parameters become views of flat, sharded buffers; modules learn to read them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from . import stale_optimizers
from .mesh import DataParallelMesh, data_parallel_mesh, note_spread, sharding_over
from .padding import warn_of_padding
from .planner import BufferPlan, Granularity, TensorSpec, combine, plan_unit
from .quantize import BlockInt8, BlockQuantizer
from .ragged.dtensor import RaggedDTensor
from .runtime.boundary import Binding
from .runtime.dbuffer import CommPolicy, DBuffer, GradientSync
from .runtime.model import Model
from .sharded_class import make_sharded, note_dtypes
from .sharded_module import Access, ShardedModule, Unit, buffers_in, unit_of
from .sharding_checks import (
    GradientQuantizerFn,
    GranularityFn,
    QuantizerFn,
    check_arguments,
    check_one_device,
    check_params,
    check_quantizers,
    granularities_in,
    ignored_in,
    quantizers_of,
)
from .storage import allocate
from .unaveraged import leave_alone, refuse_replaced
from .units import UnitMembers, find_units, group_by_buffer, owners

_COLLECTIVE_BYTES = 16  # NCCL's fast path wants multiples

Blocks = dict[nn.Parameter, Granularity | None]  # what may not be cut of each parameter
Layout = tuple[BufferPlan, dict[str, nn.Parameter], CommPolicy]  # of a buffer


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    granularity: GranularityFn | Sequence[GranularityFn] | None = None,
    quantize: BlockQuantizer | QuantizerFn | None = None,
    quantize_gradients: BlockInt8 | GradientQuantizerFn | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> nn.Module:
    """Shards a module's parameters over the ranks of a mesh, as ``torch.distributed.fsdp.fully_shard`` does.

    Called on inner modules and then on the root, each call makes one unit of the parameters that are not sharded yet.
    Called on a module with no units inside, each element of its outermost ``nn.ModuleList``\\ s, and
    ``nn.ModuleDict``\\ s of numbers, becomes a unit, and the remaining parameters another. A unit is what one
    all-gather brings together, but for these cases. One that has units inside has a buffer, and a gather, for what
    stands before each of them and after (an embedding and a head), if that is a mebibyte or more, on GPUs 16. What
    differs in dtype, trainability or quantizers has a buffer of its own, and so have blocks that together would pad
    much. And an element of a list has one for each of its parts (attention and the matrices of a feed-forward, say):
    the smallest modules and parameters inside it, but none inside a list of experts, that have 15 % of its bytes or
    more, as many mebibytes, and 256 KiB for each rank, if that takes hardly more padding. So the second is gathered
    while the first is computed; call ``fully_shard`` on the elements to gather each at once.

    Every parameter becomes a :class:`RaggedDTensor` of the same name, cut between blocks of ``granularity``
    (veScale-FSDP, arXiv 2602.22437) and stored in one flat buffer for each unit, dtype, trainability and choice of
    quantizers. Build the optimizer afterwards: a step of one that was built before raises RuntimeError.

    Nothing is sent: each rank keeps its part of its own values, which must be equal on all. Every rank calls it, in the
    same order.

    Args:
        module: sharded in place. Parameters may be on the meta device; call ``to_empty`` and initialize
            afterwards, and each rank gets its part of what the same seed gives the unsharded module.
        mesh: a 1-D mesh to shard over; by default all ranks of the default process group. Or, for hybrid sharding, a
            2-D mesh with named dimensions: parameters are sharded over dimension 1 and replicated over dimension 0,
            over which gradients are averaged after their reduce-scatter. Replicas must begin with equal values, which
            is checked at first use. Inner modules may be sharded over other meshes of the same ranks: experts over all
            of them, say, and what is around them over those of a node.
        reshard_after_forward: free gathered parameters after the forward, and gather again in the backward; where
            the backend is given a ``memory_budget``, only of as many units as it takes to stay within it, and where
            not, of all but the unit that the backward reads first, if gathering one unit ahead takes as much.
            False keeps them: one gather less, and the memory of the unsharded parameters.
        mp_policy: dtypes of gathers, reductions, inputs and outputs. Sharded parameters keep their own dtype; gradients
            are reduced in ``param_dtype`` where ``reduce_dtype`` is left out.
        granularity: called with each parameter's name and the parameter; the smallest piece that may not be
            cut, None for single elements. Optimizers state the one that they need
            (``vescale_compile.optim.AdamW8bit.granularity``). Of several, in a list, no piece of any is cut.
        quantize: ``BlockFP8``, ``BlockInt8`` or ``MXFP8``: gathers bring 8-bit codes and scales, of parameters of two
            or more dimensions, quantized in blocks by the rank that holds them, and dequantized to the dtype of
            gathers. Shards and gradients are as without. Or a function, called with each parameter's name and the
            parameter, that gives one of them, or None for a parameter to leave out: routers, embeddings, heads. What
            has another quantizer, or none, is another gather of its unit.
        quantize_gradients: ``BlockInt8``: reductions send 8-bit codes and scales, of gradients of parameters of two or
            more dimensions, rounded stochastically; each rank averages, in float32, what all send it. See
            :func:`rounding_state`. Over the replicas of a 2-D mesh the averages are exchanged in ``reduce_dtype``. Or a
            function that gives it, or None, as with ``quantize``.
        ignored_params: parameters to leave as they are, of this module or of others: whole ones, whose gradients are
            not averaged, and those that are sharded over a mesh of other ranks, whose gradients are averaged over that,
            and clipped by :func:`vescale_compile.clip_grad_norm_`.

    Returns:
        ``module``.

    Raises:
        RuntimeError: no process group, or the module is what ``torch.compile`` returned.
        ValueError: nothing to shard, a mesh that does not fit, a parameter that can't be sharded or has a gradient or
            hooks, blocks to quantize that are larger than a parameter.
        TypeError: an argument of another type.
    """
    check_arguments(module, reshard_after_forward, mp_policy)
    check_quantizers(quantize, quantize_gradients)
    granularities = granularities_in(granularity)
    over = data_parallel_mesh(module, mesh)
    # Before parameters are tied: what holds a parameter of a unit elsewhere is no unit.
    nested = any(unit_of(part) is not None for part in module.modules())
    _tie_to_sharded(module)
    policy = mp_policy if mp_policy is not None else MixedPrecisionPolicy()
    ignored = ignored_in(ignored_params)
    check_params(module, over, ignored)
    check_one_device(module, over, ignored)

    def asked(name: str, param: nn.Parameter) -> tuple[CommPolicy, Granularity | None]:
        quantizers = quantizers_of(quantize, quantize_gradients, name, param, over.where)
        uncut = (*granularities, *(each.granularity for each in quantizers if each is not None))
        comm = CommPolicy(policy.param_dtype, policy.reduce_dtype, reshard_after_forward, *quantizers)
        return comm, _granularity(uncut, name, param, over.where)

    units = _planned(module, over, ignored, asked, nested_units=nested)
    if not units and not nested:  # a root may have nothing but units inside
        where = f"{over.where}fully_shard({type(module).__name__})"
        raise ValueError(f"{where}: no parameters left to shard. {_why_none_is_left(module)}")
    warn_of_padding({members.name: [plan for plan, *_ in layouts] for members, layouts in units}, over.whole)
    if all(members.module is not module for members, _ in units):  # what the root does at its edge, it does without any
        make_sharded(module, {}, _unit_of((), policy, is_root=True))
    places = owners(module)
    while units:  # of which each frees what its parameters were
        members, layouts = units.popleft()
        make_sharded(members.module, {}, _shard_unit(members, layouts, places, over, policy, root=module))
    _name_buffers(module)
    note_dtypes(module)
    note_spread(module.parameters())
    leave_alone(ignored)
    buffers = buffers_in(module)
    model = cast(ShardedModule, module)._vescale_model = Model(buffers, module)
    for buffer in buffers:
        buffer.model = model
    stale_optimizers.watch()
    return module


def _planned(
    module: nn.Module,
    mesh: DataParallelMesh,
    ignored: set[nn.Parameter],
    asked: Callable[[str, nn.Parameter], tuple[CommPolicy, Granularity | None]],
    *,
    nested_units: bool,
) -> deque[tuple[UnitMembers, list[Layout]]]:
    """The units, inner ones first, and how the buffers of each are laid out: of all, before any is changed.

    ``asked`` says how a parameter travels, and what may not be cut of it.
    """
    blocks: Blocks = {}
    comms: dict[nn.Parameter, CommPolicy] = {}
    with sharding_over(mesh):
        for name, param in module.named_parameters():
            if param not in ignored and not isinstance(param, RaggedDTensor):
                comms[param], blocks[param] = asked(name, param)

    def planned(params: Mapping[str, nn.Parameter]) -> list[Layout]:
        return [
            (plan, group, comm)
            for alike in group_by_buffer(params)
            for comm, group in _by_policy(alike, comms).items()
            for plan in _plan(group, mesh, comm, blocks)
        ]

    def padded_bytes(params: Mapping[str, nn.Parameter]) -> int:
        return sum(plan.shard_bytes for plan, *_ in planned(params))

    units = find_units(
        module,
        ignored,
        nested_units=nested_units,
        world_size=mesh.shard.size(),
        device_type=mesh.device_type,
        padded_bytes=padded_bytes,
    )
    return deque((members, [each for run in members.runs for each in planned(run)]) for members in units)


def _why_none_is_left(module: nn.Module) -> str:
    """Why no parameters are left to shard."""
    sharded = next((name for name, param in module.named_parameters() if isinstance(param, RaggedDTensor)), None)
    if sharded is None:
        return "They are in ignored_params, or the module has none."
    return (
        f"Parameter {sharded!r} is sharded already, by a call on a module around this one or tied to it. Call "
        "fully_shard on inner modules first."
    )


def _shard_unit(
    members: UnitMembers,
    layouts: Sequence[Layout],
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]],
    mesh: DataParallelMesh,
    policy: MixedPrecisionPolicy,
    *,
    root: nn.Module,
) -> Unit:
    sync = GradientSync()
    buffers = []
    for ordinal, (plan, group, comm) in enumerate(layouts):
        name = members.name if len(layouts) == 1 else f"{members.name}#{ordinal}"
        params = {tensor.name: group[tensor.name] for tensor in plan.tensors}
        buffer = allocate(name, plan, params, mesh, comm, sync)
        buffer.is_part = members.is_cut
        buffers.append(buffer)
        for index, (original, sharded) in enumerate(zip(params.values(), buffer.params, strict=True)):
            original._vescale_sharded = sharded  # type: ignore[attr-defined]
            if original.requires_grad:
                original.register_hook(functools.partial(refuse_replaced, sharded))
            for owner, attribute in places.pop(original):
                _put(owner, attribute, cast(nn.Parameter, sharded), Binding(buffer, index))
    return _unit_of(tuple(buffers), policy, is_root=members.module is root)


def _unit_of(buffers: tuple[DBuffer, ...], policy: MixedPrecisionPolicy, *, is_root: bool) -> Unit:
    return Unit(
        buffers,
        input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
        output_dtype=policy.output_dtype if is_root else None,
    )


def _put(owner: nn.Module, attribute: str, sharded: nn.Parameter, binding: Binding) -> None:
    owner._parameters[attribute] = sharded
    make_sharded(owner, {attribute: Access.to(binding)}, None)


def _tie_to_sharded(module: nn.Module) -> None:
    """Parameters that are tied to one that an earlier call sharded become that one again."""
    for param, places in owners(module).items():
        sharded = getattr(param, "_vescale_sharded", None)
        if sharded is not None:
            for owner, attribute in places:
                _put(owner, attribute, sharded, sharded._vescale_binding)


def _name_buffers(module: nn.Module) -> None:
    """Names units and parameters as ``module`` does, those of earlier calls on its parts included."""
    names = {param: name for name, param in module.named_parameters()}
    for path, part in module.named_modules():
        if (made := unit_of(part)) is not None:
            buffers = made.buffers
            for ordinal, buffer in enumerate(buffers):
                unit = path or "(root)"
                slots = [
                    names.get(cast(nn.Parameter, p), s.name) for p, s in zip(buffer.params, buffer.slots, strict=True)
                ]
                buffer.rename(unit if len(buffers) == 1 else f"{unit}#{ordinal}", slots)


def _by_policy(
    params: Mapping[str, nn.Parameter], comms: Mapping[nn.Parameter, CommPolicy]
) -> dict[CommPolicy, dict[str, nn.Parameter]]:
    """Parameters by how they travel: a collective has one way."""
    groups: dict[CommPolicy, dict[str, nn.Parameter]] = {}
    for name, param in params.items():
        groups.setdefault(comms[param], {})[name] = param
    return groups


def _plan(
    params: dict[str, nn.Parameter], mesh: DataParallelMesh, policy: CommPolicy, blocks: Blocks
) -> tuple[BufferPlan, ...]:
    """Lays one buffer's parameters out; a rank's part is a multiple of 16 bytes in every dtype it travels in."""
    tensors = [TensorSpec(name, tuple(p.shape), p.element_size(), blocks[p]) for name, p in params.items()]
    itemsize = tensors[0].itemsize
    communicated = [dtype.itemsize for dtype in (policy.param_dtype, policy.reduce_dtype) if dtype is not None]
    communicated += [1 for quantizer in (policy.quantize, policy.quantize_gradients) if quantizer is not None]
    smallest = min([itemsize, *communicated])
    return plan_unit(tensors, mesh.shard.size(), alignment_bytes=_COLLECTIVE_BYTES * itemsize // smallest).buffers


def _granularity(
    granularities: Sequence[GranularityFn], name: str, param: nn.Parameter, where: str
) -> Granularity | None:
    try:
        return combine([each(name, param) for each in granularities], param.shape)
    except TypeError as error:
        raise TypeError(f"{where}fully_shard: parameter {name!r}: {error}") from error
    except ValueError as error:  # that of a quantizer or an optimizer names the parameter
        raise ValueError(f"{where}fully_shard: {error}") from error
