"""DBuffer, a unit's buffers over a device mesh (the distributed buffer of veScale-FSDP, arXiv 2602.22437).

All of a unit's parameters lie in one buffer of world_size * S elements, each contiguous and cut only where it may be,
``.`` being padding. A rank owns S of them, the same S on every rank, so that graphs which take them are too. On rank 1
of three::

                                                    | rank 0's S    | rank 1's S    | rank 2's S    |
    layout                                          | a a a a b b b | b b b b . c c | c c d d d . . |

    master shard     [S]       parameters' dtype                    | b b b b . c c |
                                                                    copied or cast, once, into its place
    unsharded        [3 * S]   param_dtype          | a a a a b b b | b b b b . c c | c c d d d . . |
                               a slot               received        shared          received

    gradients        [3 * S]   reduce_dtype         | a a a a b b b | b b b b . c c | c c d d d . . |
                               a slot               sent            averaged        sent
    reduced shard    [S]       reduce_dtype                         | b b b b . c c |

The master shard and the reduced shard are what parameters' and gradients' local tensors are views of. Communication
has no shard of its own: what is sent lies where it is computed with. What is done to a whole unit is one kernel: the
cast before a gather, the sum of micro-batches, and, between two paddings, zeroing and scaling of gradients.

Where parameters or gradients are quantized, what is sent and received is packed (see ``packing``): a rank's shard is
quantized into its place there instead of cast, and the unsharded buffer is dequantized from it; gradients are quantized
from theirs, and a rank's part is averaged from what all ranks send it.

On a 2-D mesh dimension 1 shards as above, and dimension 0 holds replicas of each shard: the reduced shard is then
averaged over them, in place.
"""

from __future__ import annotations

import copy
import hashlib
import math
import weakref
import zlib
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..torch_internals.tracing import is_shape
from . import collectives
from .groups import name_group
from .model import Model
from .packing import Packing, Quantizer, StochasticQuantizer, packing_for
from .reductions import Reductions
from .rounding import Rounding
from .unshard import CommSpec, ParamView


@dataclass(frozen=True)
class ParamSlot:
    """A parameter's place in its unit's buffer.

    Attributes:
        name: the parameter's qualified name in the module that was sharded.
        shape: global shape.
        offset: first element in the buffer of world_size * S elements.
        local_start, local_numel: this rank's part, in elements of the shard; numel may be 0.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    local_start: int
    local_numel: int


@dataclass(frozen=True)
class CommPolicy:
    """What a unit's user asked of its communication.

    Attributes:
        param_dtype: of gathers; None for the parameters' own.
        reduce_dtype: of reductions; None for that of gathers.
        reshard_after_forward: free the gathered parameters after the forward and gather again in the backward.
        quantize: how parameters travel; None for in ``param_dtype``.
        quantize_gradients: how gradients travel; None for in ``reduce_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    quantize: Quantizer | None = None
    quantize_gradients: StochasticQuantizer | None = None


class Peers:
    """Buffers that ``no_sync`` was ever entered for together, as long as they live."""

    def __init__(self, buffers: Iterable[DBuffer] = ()) -> None:
        self._buffers = [weakref.ref(buffer) for buffer in buffers]

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return Peers()

    def buffers(self) -> list[DBuffer]:
        return [buffer for each in self._buffers if (buffer := each()) is not None]


@dataclass(eq=False)
class GradientSync:
    """Whether a unit's next gradient is reduced. Shared by the buffers of a unit.

    Attributes:
        enabled: False inside ``no_sync``.
        accumulates: whether ``no_sync`` was ever entered. What a module reads, and Dynamo guards on: graphs have to
            know where gradients accumulate.
        peers: the buffers that ``no_sync`` was ever entered for together with the unit's, and these.
    """

    enabled: bool = True
    accumulates: bool = False
    peers: Peers = field(default_factory=Peers)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientSync:
        """Of a copy, which no ``no_sync`` that is going on is for."""
        return GradientSync(accumulates=self.accumulates)

    def set_enabled(self, enabled: bool) -> None:
        self.enabled = enabled
        self.accumulates = self.accumulates or not enabled


@dataclass(eq=False)
class DBuffer:
    """The buffers of a unit's parameters of one dtype that are all trainable or all frozen.

    Attributes:
        name: the unit's qualified name, with the buffer's ordinal if the unit has several.
        shard: [S], this rank's elements.
        slots: the parameters, in the order in which they lie in the buffer.
        mesh: 1-D, or 2-D with replicas in dimension 0; the last dimension shards.
        group: the process group that the buffer is sharded over; derived.
        replicas: the ranks that hold the same shard, over which gradients are averaged too; derived, None without.
        layout, param_dtype, reduce_dtype: derived; plain attributes, because Dynamo guards on them.
        packing, gradient_packing: of quantized gathers and reductions; derived, None where nothing is quantized.
        reductions: the gradients that accumulate, and how those that are quantized are rounded.
        params: the sharded parameters themselves, one for each slot, once they exist.
        model: what it was sharded with.
        agreed: whether all ranks are known to have the same layout.
        deadline: seconds, of the last compiled graph that gathered it; None if there was none.
        left_compiled_code: whether all ranks are known to have gathered it without one after that.
        is_part: whether the unit was cut into parts, and this is one.
        forward: number of the last forward of a module that has it.
    """

    name: str
    shard: Tensor
    slots: tuple[ParamSlot, ...]
    mesh: DeviceMesh
    policy: CommPolicy
    sync: GradientSync
    params: list[Tensor] = field(default_factory=list)
    model: Model = field(default_factory=Model)
    agreed: bool = False
    deadline: float | None = None
    left_compiled_code: bool = False
    is_part: bool = False
    forward: int = 0

    def __post_init__(self) -> None:
        self.group = self.mesh.get_group(self.mesh.ndim - 1)
        self.replicas = self.mesh.get_group(0) if self.mesh.ndim == 2 and self.mesh.size(0) > 1 else None
        self.world_size = self.group.size()
        self.rank = self.group.rank()
        places = [(slot.shape, slot.offset) for slot in self.slots]
        self.group_name = name_group(self.mesh, self.mesh.ndim - 1)
        self.replicas_name = name_group(self.mesh, 0) if self.replicas is not None else ""
        text = repr((self.world_size, self.group_name, self.replicas_name, self.shard.numel(), places, self.policy))
        self.reductions = Reductions(Rounding(self.name))
        # Names everything of the buffer that a compiled graph depends on, dtypes apart; equal on all ranks, as names of
        # groups are.
        self.layout = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.set_shard(self.shard)

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> DBuffer:
        """A buffer of its own memory and parameters, on the same mesh."""
        copied = copy.copy(self)
        memo[id(self)] = copied  # before the parameters, which lead back here
        for name in ("shard", "params", "model", "sync", "reductions"):
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        copied.deadline, copied.left_compiled_code = None, False  # no graph has gathered it
        copied.model.buffers.add(copied)
        for index, param in enumerate(copied.params):  # copied by itself, each has lost the shard's count of writes
            cast(DTensor, param)._local_tensor = copied.local(copied.shard, index)
        return copied

    @property
    def block(self) -> str:
        """The name of what it is a part of; empty if it is none."""
        return self.name.rpartition("#")[0] if self.is_part else ""

    def rename(self, name: str, params: Sequence[str]) -> None:
        """Gives the unit and its parameters other names, for messages."""
        self.name = self.reductions.rounding.unit = name
        self.slots = tuple(replace(slot, name=new) for slot, new in zip(self.slots, params, strict=True))

    def forget_gradients(self, params: AbstractSet[Tensor]) -> None:
        """Drops what was held back of the gradients of these parameters."""
        places = {
            index: (slot.offset, math.prod(slot.shape))
            for index, (slot, param) in enumerate(zip(self.slots, self.params, strict=True))
            if param in params
        }
        if len(places) == len(self.slots):
            self.reductions.forget()
        else:
            self.reductions.forget_some(places)

    def set_shard(self, shard: Tensor) -> None:
        """Takes another tensor of as many elements as the shard: another device or dtype, or new memory. Its padding
        becomes zeros: it is sent too, and replicas must be equal."""
        self.agreed = self.agreed and (shard.dtype, shard.device) == (self.shard.dtype, self.shard.device)
        self.shard = shard
        end = 0
        for slot in sorted(self.slots, key=lambda slot: slot.local_start):
            _zero(shard, end, slot.local_start)
            end = max(end, slot.local_start + slot.local_numel)
        _zero(shard, end, shard.numel())
        floats = shard.dtype.is_floating_point
        self.param_dtype = (self.policy.param_dtype if floats else None) or shard.dtype
        self.reduce_dtype = (self.policy.reduce_dtype if floats else None) or self.param_dtype
        self.packing = self._packing(self.policy.quantize, self.param_dtype) if floats else None
        self.gradient_packing = self._packing(self.policy.quantize_gradients, self.reduce_dtype) if floats else None

    def _packing(self, quantizer: Quantizer | None, dtype: torch.dtype) -> Packing | None:
        if quantizer is None:
            return None
        key = f"{self.layout}/{quantizer}/{dtype}"
        params = [(slot.offset, slot.shape) for slot in self.slots]
        return packing_for(key, quantizer, self.world_size, self.shard.numel(), params, dtype)

    @property
    def reductions_handle(self) -> Tensor | None:
        """Names the unit's reductions in graphs; None if no more is to be known of them."""
        return self.reductions.handle if self.sync.accumulates or self.gradient_packing else None

    @property
    def numel(self) -> int:
        """Elements of the gathered buffer, padding included."""
        return self.world_size * self.shard.numel()

    @property
    def gathered_bytes(self) -> int:
        """Of the gathered buffer."""
        return self.numel * self.param_dtype.itemsize

    @property
    def trains(self) -> bool:
        """Whether its parameters have gradients."""
        return any(param.requires_grad for param in self.params)

    def describe(self) -> tuple[list[str], list[str]]:
        """Lines that must be equal on every rank of the mesh: of the parameters, and of how they lie and travel."""
        params = [
            f"parameter {slot.name}: shape {slot.shape}, requires_grad={param.requires_grad}"
            for slot, param in zip(self.slots, self.params, strict=True)
        ]
        unit = (
            f"unit {self.name}: {len(self.slots)} parameters, {self.shard.dtype} on {self.shard.device.type}, "
            f"shard of {self.shard.numel()} elements, mesh {tuple(self.mesh.shape)}, {self.policy}"
        )
        return params, [unit, *(f"place of {slot.name}: {slot.offset} in unit {self.name}" for slot in self.slots)]

    def checksum(self) -> int:
        """A number that equal shards have in common, exact and independent of the order of summation; 0 without
        memory."""
        if self.shard.is_meta or is_shape(self.shard):
            return 0
        return int(self.shard.view(torch.int32).sum(dtype=torch.int64).item())

    def view_of(self, index: int, *, trainable: bool) -> ParamView:
        slot = self.slots[index]
        return ParamView(slot.offset, slot.shape, trainable)

    @property
    def number(self) -> int:
        """Tells it from the model's other buffers, alike on all ranks."""
        return zlib.crc32(self.name.encode())

    def comm(self, unit: int) -> CommSpec:
        return CommSpec(
            unit=unit,
            world_size=self.world_size,
            group=self.group_name,
            replicas=self.replicas_name,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            reduce_scratch=collectives.scratch_numel(self.shard.numel(), self.shard.device, self.group),
            packing=self.packing.key if self.packing else "",
            packed_bytes=self.packing.nbytes if self.packing else 0,
            gradient_packing=self.gradient_packing.key if self.gradient_packing else "",
            packed_gradient_bytes=self.gradient_packing.nbytes if self.gradient_packing else 0,
            coalesces=collectives.coalesces(self.shard.device, self.group),
            exchanges=collectives.exchanges_directly(self.shard.device, self.group),
            replica_count=self.replicas.size() if self.replicas is not None else 1,
        )

    def local(self, flat: Tensor, index: int) -> Tensor:
        """This rank's part of parameter ``index`` in ``flat`` [S]: a view, 1-D."""
        slot = self.slots[index]
        return flat.narrow(0, slot.local_start, slot.local_numel)


@torch.no_grad()
def _zero(flat: Tensor, start: int, stop: int) -> None:
    if start < stop:
        flat[start:stop].zero_()
