"""What an optimizer asks of a parameter: its name, its rank, the elements that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..ragged.dtensor import RaggedDTensor
from ..runtime.boundary import binding_of
from ..runtime.writes import count_writes

NamedParams = Sequence[tuple[str | None, Tensor]]


def describe(param: Tensor, name: str | None = None) -> str:
    """A parameter in a message: by its name in the sharded module, else by ``name``, else by its shape alone."""
    binding = binding_of(param)
    if binding is not None:
        name = binding.buffer.slots[binding.slot].name
    shape = f"of shape {tuple(param.shape)}"
    return f"a parameter {shape}" if name is None else f"parameter {name!r} {shape}"


def rank_prefix(param: Tensor) -> str:
    """``"[rank r] "`` for a parameter that lies on several ranks, else nothing."""
    return f"[rank {param.device_mesh.get_rank()}] " if isinstance(param, DTensor) else ""


def local_elements(tensor: Tensor) -> Tensor:
    """This rank's elements of a sharded or a contiguous plain tensor: [numel], aliased, without autograd."""
    if isinstance(tensor, RaggedDTensor):
        return tensor._local_tensor.detach()
    return tensor.detach().view(-1)


def local_grad(param: Tensor) -> Tensor:
    """This rank's elements of a parameter's gradient: [numel]."""
    assert param.grad is not None
    return local_elements(param.grad if isinstance(param.grad, RaggedDTensor) else param.grad.contiguous())


def mark_written(params: Iterable[Tensor]) -> None:
    """Counts the versions of parameters up, as writing to them does, also where this rank holds no element of one:
    whether values have changed since they were gathered is asked on every rank."""
    written = [local_elements(param) for param in params]
    increment_version(written)
    count_writes(written)
