"""RaggedDTensor: a DTensor placed by RaggedShard, its local tensor a flat run of the whole's elements."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

# Private: DTensor's own constructor takes a spec, and no public function returns a subclass of DTensor.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# Private: optimizers and clip_grad_norm_ take their foreach form only for the tensor types in these two
# lists.
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _utils_foreach_types
from torch.utils.hooks import RemovableHandle

from vescale_compile.ragged.placement import RaggedShard, RaggedShardError, check_layout, row_major_strides
from vescale_compile.runtime.arrivals import Arrival
from vescale_compile.torch_internals.tracing import honor_torch_dispatch


class _Spec(DTensorSpec):
    """What a tensor has in common with all that is made of it: gradients, states of optimizers, views.

    What is compared of one never changes: a tensor is given another instead. So Dynamo's guards, which keep a copy,
    are given itself, and compare no ranks and placements for each parameter in each call of a graph.

    Attributes:
        whole: with hybrid sharding, the 2-D mesh whose last dimension the tensor is sharded over; else None.
        spread: of a parameter of a model that other ranks have others of (experts, say), the mesh of all ranks of the
            model; else None.
    """

    whole: DeviceMesh | None = None
    spread: DeviceMesh | None = None

    def but(self, placements: tuple[Placement, ...], tensor_meta: TensorMeta | None) -> _Spec:
        """That of a tensor of another placement or shape on the same ranks."""
        spec = _Spec(self.mesh, placements, tensor_meta=tensor_meta)
        spec.whole, spec.spread = self.whole, self.spread
        return spec

    def __deepcopy__(self, memo: dict[int, Any]) -> _Spec:
        return self

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        return self is other or super()._check_equals(other, skip_shapes)


class RaggedDTensor(DTensor):
    """A tensor of the global shape, of which this rank holds one contiguous run of elements (RaggedShard).

    Elementwise operations, ``torch.optim`` steps and initialization run on the local tensor; norms, dot products and
    full reductions (sums, means and extremes without autograd only) reduce over the mesh. Views of all elements, runs
    of rows and writes by a mask work, too. Any other operation raises RaggedShardError: nothing is gathered in silence.
    Inside the forward of a module given to ``fully_shard``, its parameters are whole tensors instead.
    """

    _spec: _Spec

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # DTensor's does nothing either, but hides from Dynamo while it does, which takes longer than all of __new__.
        pass

    @property
    def data(self) -> torch.Tensor:
        """This tensor, detached from autograd, as of ``torch.Tensor``. Another can't be assigned to it: PyTorch would
        take a tensor of the same shape and keep this rank's elements as they were."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, RaggedDTensor) and value._local_tensor.is_set_to(self._local_tensor):
            return  # what Python does behind param.data -= ..., which has written in place
        raise RaggedShardError(
            f"{self!r}.data = ... would change none of its elements. Write the values into it: with torch.no_grad(): "
            "param.copy_(tensor), with the whole tensor or one that is sharded alike"
        )

    @property
    def placement(self) -> RaggedShard:
        """The one placement of this tensor."""
        return self.placements[0]  # type: ignore[return-value]

    @property
    def interval(self) -> tuple[int, int]:
        """The elements of the row-major flattened tensor that this rank holds: ``(start, stop)``."""
        return self.placement.interval(self.shape, self.device_mesh.get_local_rank())

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """As of ``torch.Tensor``, for gradients that there are: a backward inside ``no_sync`` gives parameters none."""
        return super().register_hook(lambda grad: None if grad is None else hook(grad))

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """As of ``torch.Tensor``, where there is a gradient: a backward inside ``no_sync`` gives parameters none."""
        return super().register_post_accumulate_grad_hook(lambda param: None if param.grad is None else hook(param))

    @staticmethod
    def from_local(  # type: ignore[override]
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        requires_grad: bool = False,
        whole: DeviceMesh | None = None,
    ) -> RaggedDTensor:
        """Makes a RaggedDTensor of this rank's elements, without communication or copy.

        Args:
            local_tensor: contiguous, one-dimensional, with as many elements as the placement gives this
                rank.
            device_mesh: a one-dimensional mesh that this rank belongs to.
            placements: one RaggedShard with one count of units for each rank of the mesh.
            shape: the global shape.
            stride: the global strides; only the row-major ones of `shape` are possible.
            requires_grad: makes the result a leaf that requires gradients. Otherwise the result is
                differentiable with respect to `local_tensor`, as with ``DTensor.from_local``.
            whole: with hybrid sharding, the 2-D mesh whose last dimension `device_mesh` is.

        Raises:
            ValueError: an argument does not fit the others; the message names the rank.
        """
        shape = torch.Size(shape)
        placement = check_layout(device_mesh, placements, shape)
        rank = device_mesh.get_local_rank()
        where = f"RaggedDTensor.from_local on rank {rank} of {device_mesh.size()}"
        if stride is not None and tuple(stride) != row_major_strides(shape):
            raise ValueError(
                f"{where}: strides {tuple(stride)} for shape {tuple(shape)}; RaggedShard cuts row-major "
                f"tensors, here {row_major_strides(shape)}. Call .contiguous() on the whole tensor first."
            )
        start, stop = placement.interval(shape, rank)
        if local_tensor.shape != (stop - start,) or not local_tensor.is_contiguous():
            raise ValueError(
                f"{where}: {placement} gives this rank elements [{start}, {stop}) of shape {tuple(shape)}; "
                f"the local tensor must be contiguous with shape {(stop - start,)}, got shape "
                f"{tuple(local_tensor.shape)} and strides {local_tensor.stride()}"
            )
        if local_tensor.device.type not in (device_mesh.device_type, "meta"):
            raise ValueError(
                f"{where}: the local tensor is on {local_tensor.device}, the mesh on {device_mesh.device_type}"
            )
        spec = _Spec(
            device_mesh,
            (placement,),
            tensor_meta=TensorMeta(shape, row_major_strides(shape), local_tensor.dtype),
        )
        spec.whole = whole if whole is not device_mesh else None
        if requires_grad:
            return wrap(local_tensor.detach(), spec, requires_grad=True)
        return _FromLocal.apply(local_tensor, spec)

    def with_local(self, local: torch.Tensor) -> RaggedDTensor:
        """This tensor's mesh, placement and global shape around another local tensor, which is aliased.

        Args:
            local: one-dimensional, contiguous, with as many elements as this tensor's own; any dtype and
                device.

        The result is detached from autograd. Nothing is sent.

        Raises:
            ValueError: another shape, or not contiguous.
        """
        self._check_local(local)
        return wrap(local, self._spec)

    def placed(self, local: torch.Tensor, placement: RaggedShard, shape: Sequence[int]) -> RaggedDTensor:
        """A tensor of another shape and placement on the ranks of this one, around `local`, which is aliased.

        Detached from autograd. Nothing is sent, nothing is checked.
        """
        meta = TensorMeta(torch.Size(shape), row_major_strides(shape), local.dtype)
        return wrap(local, self._spec.but((placement,), meta))

    def _check_local(self, local: torch.Tensor) -> None:
        if local.shape != self._local_tensor.shape or not local.is_contiguous():
            raise ValueError(
                f"with_local on {self!r}: the local tensor must be contiguous with shape "
                f"{tuple(self._local_tensor.shape)}, got shape {tuple(local.shape)}, strides {local.stride()}"
            )

    def share_mesh(self, other: RaggedDTensor) -> None:
        """Takes the mesh of a tensor, equal to its own, in its place; its placement, too, if that is equal."""
        if self.device_mesh is not other.device_mesh:
            same = self.placements == other.placements  # one object is compared faster
            placements = other.placements if same else self.placements
            self._spec = other._spec.but(placements, self._spec.tensor_meta)

    def with_arriving(self, local: torch.Tensor, arrival: Arrival) -> RaggedDTensor:
        """:meth:`with_local` of elements that are on their way: whoever first asks for them waits for ``arrival``."""
        from vescale_compile.ragged.arriving import arriving

        self._check_local(local)
        return arriving(local, self._spec, arrival)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's elements, one-dimensional, aliasing this tensor. Differentiable.

        Args:
            grad_placements: the placement of the gradient that will flow back, by default this tensor's
                own.

        Raises:
            NotImplementedError: another placement.
        """
        if not torch.is_grad_enabled():
            return self._local_tensor
        placements = self.placements if grad_placements is None else tuple(grad_placements)
        if placements != self.placements:
            raise NotImplementedError(
                f"to_local on {self!r}: grad_placements {placements}; the gradient of a flat shard can only "
                f"be placed as the tensor is"
            )
        return _ToLocal.apply(self)

    def redistribute(  # type: ignore[override]
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """This tensor under another placement of the same mesh. Differentiable; every rank must call it.

        Args:
            device_mesh: this tensor's mesh (the default); moving to another is not possible.
            placements: one RaggedShard, Replicate or Shard.

        Returns:
            A RaggedDTensor for a RaggedShard, else a DTensor.

        Raises:
            ValueError: no placements, or several; another mesh.
            NotImplementedError: a placement that it can't be moved to.
        """
        from vescale_compile.ragged.redistribute import redistribute

        if placements is None:
            raise ValueError(f"redistribute on {self!r}: placements is needed")
        return redistribute(self, device_mesh or self.device_mesh, placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, gathered on every rank; every rank must call it.

        Differentiable: the gradient is taken as placed by `grad_placements`, by default Replicate, as with
        ``DTensor.full_tensor``. ``[Partial()]`` sums what the ranks' losses contribute.
        """
        replicated = self.redistribute(placements=[Replicate()])
        if not torch.is_grad_enabled():
            return replicated.to_local()
        return replicated.to_local(grad_placements=grad_placements or [Replicate()])

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedDTensor:
        """A copy of the local tensor; tensors that share memory do so in the copy, as with any tensor. As with any
        parameter, a parameter's copy has no gradient."""
        if id(self) in memo:
            return memo[id(self)]
        copied = wrap(copy.deepcopy(self._local_tensor, memo), self._spec, requires_grad=self.requires_grad)
        memo[id(self)] = copied  # before the attributes, which may lead back here
        if not isinstance(self, torch.nn.Parameter):
            copied.grad = copy.deepcopy(self.grad, memo)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        mesh = self.device_mesh
        rank = mesh.get_local_rank()
        start, stop = self.interval
        grad = ", requires_grad=True" if self.requires_grad else ""
        binding = getattr(self, "_vescale_binding", None)  # of a parameter that fully_shard has made
        name = "" if binding is None else f"{binding.buffer.slots[binding.slot].name}, "
        return (
            f"RaggedDTensor({name}shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"{self.placement}, rank {rank} of {mesh.size()} holds [{start}, {stop}){grad})"
        )

    # The hooks of torch.distributed.checkpoint.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from vescale_compile.ragged.checkpoint import write_items

        return write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        from vescale_compile.ragged.checkpoint import chunks

        return chunks(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        from vescale_compile.ragged.checkpoint import box

        return box(self, index)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> RaggedDTensor:
        # What DTensor puts into flatten_spec and inner_tensors differs between PyTorch versions.
        plain = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        spec = _Spec(plain._spec.mesh, plain._spec.placements, tensor_meta=plain._spec.tensor_meta)
        return wrap(plain._local_tensor, spec, requires_grad=plain.requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache knows this tensor by: torch 2.13's hook for subclasses. Ranks may share the cache,
        and compiled code is for one's run; and a placement of many ranks is written in short."""
        run = (self.placement.dims, self.placement.local_units, self.interval)
        return super()._stable_hash_for_caching() + hashlib.blake2b(repr(run).encode(), digest_size=16).hexdigest()

    @classmethod
    @torch.compiler.disable  # Dynamo looks at all Python that compiled programs run
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from vescale_compile.ragged.dispatch import dispatch

        return dispatch(func, args, kwargs or {})


def take_foreach_form(subclass: type[RaggedDTensor]) -> None:
    """Lets optimizers and clip_grad_norm_ take their foreach form for tensors of this type."""
    for types in (_optim_foreach_types, _utils_foreach_types):
        types.append(subclass)


take_foreach_form(RaggedDTensor)
torch.serialization.add_safe_globals([RaggedDTensor, RaggedShard, _Spec])


def wrap(
    local: torch.Tensor, spec: _Spec, *, requires_grad: bool = False, kind: type[RaggedDTensor] | None = None
) -> RaggedDTensor:
    """A RaggedDTensor, or one of another kind, that aliases `local`, with `spec`'s layout and `local`'s dtype. Nothing
    is checked."""
    assert spec.tensor_meta is not None
    if spec.tensor_meta.dtype != local.dtype:
        spec = spec.but(spec.placements, spec.tensor_meta._replace(dtype=local.dtype))
    # DTensor's constructor copies the local's storage offset to the wrapper, which has no storage to match,
    # and deepcopy and torch.save then fail: make it of a tensor at offset 0.
    origin = local if local.storage_offset() == 0 else local.new_empty(0)
    tensor = (kind or RaggedDTensor)(origin, spec, requires_grad=requires_grad)
    if origin is not local:
        tensor._local_tensor = local
    return tensor


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: _Spec) -> RaggedDTensor:
        ctx.spec = spec
        return wrap(local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None]:
        from vescale_compile.ragged.redistribute import redistribute

        return redistribute(grad, ctx.spec.mesh, ctx.spec.placements).to_local(), None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RaggedDTensor:
        return wrap(grad.contiguous(), ctx.spec)


honor_torch_dispatch(RaggedDTensor)
