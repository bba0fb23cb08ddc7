"""One step of Shampoo on the blocks of one parameter that this rank holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inverse_root import inverse_root
from .matrix_optimizer import scalar_lr
from .shampoo_blocks import Block

_ROOT = 4  # of each of a matrix's two factors: twice the order (Gupta et al., arXiv 1802.09568)
_ALIGNED = 64  # bytes, as fresh memory is
_MOST_SHAPES = 256  # of blocks in one process; far more than a model has


@dataclass(frozen=True)
class BlockedShard:
    """This rank's rows of one parameter.

    Attributes:
        param, grad, exp_avg, exp_avg_sq: [rows, n].
        left, right: [blocks, r, r] and [blocks, c, c], the factors' running averages; of a smaller block the first
            rows and columns.
        left_root, right_root: their inverse roots, alike.
        blocks: what lies in them, in order.
        first_due: of each block, the step from which its roots are due every ``frequency`` steps.
        rooted: of each block, whether its roots were ever computed. What is due does not tell: a group's ``frequency``
            may change.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    left: Tensor
    right: Tensor
    left_root: Tensor
    right_root: Tensor
    blocks: Sequence[Block]
    first_due: Sequence[int]
    rooted: list[bool]


class Renewed(NamedTuple):
    """A factor with a step's gradient in it, and its inverse root."""

    factor: Tensor
    root: Tensor


def products_are_finite(shard: BlockedShard) -> Tensor:
    """Whether no product of a block's gradient overflows: one element, which nothing waits for."""
    norms = [torch.linalg.vector_norm(_of(shard.grad, block)) for block in shard.blocks]
    # No element of a product is larger than the square of the norm.
    return torch.isfinite(torch.stack(norms).square()).all() if norms else torch.tensor(True, device="cpu")


def renewed_factors(shard: BlockedShard, step: int, options: Mapping[str, Any]) -> dict[int, tuple[Renewed, Renewed]]:
    """Left and right, by block, of the blocks whose inverse roots are due in a step; nothing is changed.

    So all ranks can find out, before they step, whether any of them can't. A block whose factors are zero, as all its
    gradients were, or all their squares in this dtype, gets no roots yet: they would precondition it.

    Args:
        step: counted from 1.

    Raises:
        NoInverseRoot: a factor has none.
    """
    beta2, renewed = options["betas"][1], {}

    def renew(factor: Tensor) -> Renewed:
        return Renewed(factor, inverse_root(factor / (1 - beta2**step), _ROOT, options["ridge"]))

    for i, block in enumerate(shard.blocks):
        since = step - shard.first_due[i]
        if since >= 0 and since % options["frequency"] == 0:
            (left, _), (right, _) = _factors(shard, i)
            by_left, by_right = _products(_of(shard.grad, block))
            left, right = left.lerp(by_left, 1 - beta2), right.lerp(by_right, 1 - beta2)
            if shard.rooted[i] or bool(left.any() & right.any()):
                renewed[i] = renew(left), renew(right)
    return renewed


def step_blocks(
    shard: BlockedShard,
    step: int,
    renewed: Mapping[int, tuple[Renewed, Renewed]],
    options: Mapping[str, Any],
    *,
    compiled: bool,
) -> None:
    """Updates averages, factors, the roots that are due, and the parameter.

    One block at a time, and its operands in aligned memory: a product's bits may depend on the size of a batch and on
    alignment, and so on how many ranks there are.

    Args:
        step: counted from 1.
        renewed: from :func:`renewed_factors`.
    """
    beta1, beta2 = options["betas"]
    corrections = [torch.tensor(1 - beta**step, dtype=shard.param.dtype, device="cpu") for beta in (beta1, beta2)]
    for i, block in enumerate(shard.blocks):
        grad, average, square = (_of(tensor, block) for tensor in (shard.grad, shard.exp_avg, shard.exp_avg_sq))
        average.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        (left, left_root), (right, right_root) = _factors(shard, i)
        if i in renewed:
            for kept, new in zip((left, left_root, right, right_root), itertools.chain(*renewed[i]), strict=True):
                kept.copy_(new)
        else:
            for factor, product in zip((left, right), _products(grad), strict=True):
                factor.lerp_(product, 1 - beta2)
        roots = (_aligned(left_root), _aligned(right_root)) if shard.rooted[i] or i in renewed else None
        update = (_run_compiled if compiled else preconditioned)(
            _copy(average), _copy(square), roots, *corrections, eps=options["eps"], grafting=options["grafting"]
        )
        param, lr = _of(shard.param, block), scalar_lr(options)
        param.mul_(1 - lr * options["weight_decay"])
        param.sub_(update * lr)


def preconditioned(
    average: Tensor,
    square: Tensor,
    roots: tuple[Tensor, Tensor] | None,
    correction1: Tensor,
    correction2: Tensor,
    *,
    eps: float,
    grafting: str | None,
) -> Tensor:
    """The direction of a block's step, [r, c].

    Args:
        average, square: [r, c], running averages of gradients and of their squares.
        roots: [r, r] and [c, c]; None for the direction that grafting alone takes.
        correction1, correction2: 0-dim, what the averages are divided by.
        eps: added to the root of the squares.
        grafting: the step's norm is that of Adam's (``"adam"``) or of the gradient's average (``"sgd"``); None leaves
            it as the preconditioner makes it (Anil et al., arXiv 2002.09018).
    """
    average = average / correction1
    grafted = average / ((square / correction2).sqrt() + eps) if grafting == "adam" else average
    if roots is None:
        return grafted
    update = roots[0] @ average @ roots[1]
    if grafting is None:
        return update
    tiny = torch.finfo(update.dtype).tiny
    return update * (_norm(grafted) / _norm(update).clamp(min=tiny))


def _norm(x: Tensor) -> Tensor:
    """The norm of all elements, 0-dim, whatever their size: squares of small ones underflow, and a step of that norm
    would be as much too large."""
    largest = x.abs().amax().clamp(min=torch.finfo(x.dtype).tiny)
    scale = largest / (2 * torch.frexp(largest).mantissa)  # a power of two: dividing by it does not round
    return (x / scale).norm() * scale


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(preconditioned, fullgraph=True, dynamic=False)


def _run_compiled(*args: Any, **options: Any) -> Tensor:
    with torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
        return _compiled()(*args, **options)


def _factors(shard: BlockedShard, i: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A block's left factor and its root, and its right ones: views."""
    r, c = shard.blocks[i].rows, shard.blocks[i].columns
    left, left_root = shard.left[i, :r, :r], shard.left_root[i, :r, :r]
    right, right_root = shard.right[i, :c, :c], shard.right_root[i, :c, :c]
    return (left, left_root), (right, right_root)


def _products(grad: Tensor) -> tuple[Tensor, Tensor]:
    """What a block's left and right factors take in."""
    grad = _copy(grad)
    return grad @ grad.T, grad.T @ grad


def _of(tensor: Tensor, block: Block) -> Tensor:
    return tensor[block.row : block.row + block.rows, block.column : block.column + block.columns]


def _aligned(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED == 0:
        return tensor
    return _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
