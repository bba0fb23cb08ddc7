"""One step of Muon on shards: matrices travel to their roots, and back, while others are computed.

::

    exchanges   out 0     | out 1        | back 0  out 2 | back 1  out 3 | back 2 ...
    computing   what is whole here       | chunk 0       | chunk 1       | chunk 2 ...

Only bfloat16 travels: the iteration begins with a cast to it, which the sender does, and ends with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import PackedExchange
from .matrices import Matrix, MatrixPlan, Part
from .matrix_optimizer import scalar_lr
from .newton_schulz import NewtonSchulz, orthogonalize


@dataclass(frozen=True)
class MatrixShard:
    """This rank's elements of one parameter.

    Attributes:
        param, grad, momentum: [n], of one dtype and device.
        start: where the n elements begin in the flattened parameter.
        options: of the parameter's group.
    """

    param: Tensor
    grad: Tensor
    momentum: Tensor
    start: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class _Held:
    """What this rank holds of one matrix."""

    matrix: Matrix
    part: Part
    root: int
    shard: MatrixShard

    @property
    def numel(self) -> int:
        return self.part.stop - self.part.start

    def of(self, flat: Tensor) -> Tensor:
        """The matrix's elements in one of the shard's tensors."""
        return flat.narrow(0, self.matrix.start + self.part.start - self.shard.start, self.numel)


@dataclass(frozen=True)
class _Out:
    """A chunk on its way to the roots; ``own`` is what the roots hold themselves, by matrix."""

    chunk: Sequence[int]
    exchange: PackedExchange
    own: Mapping[int, Tensor]


@dataclass(frozen=True)
class _Back:
    """A chunk on its way back, to what this rank holds of it."""

    exchange: PackedExchange
    held: Sequence[_Held]


class MuonStep:
    """A step on the matrices that one process group shares.

    Args:
        plan: equal on every rank of the group.
        shards: of each parameter, this rank's.
        group: None where all matrices are whole on this rank, which the plan calls 0.
    """

    def __init__(self, plan: MatrixPlan, shards: Sequence[MatrixShard], group: dist.ProcessGroup | None) -> None:
        self._plan, self._shards, self._group = plan, shards, group
        self._rank = group.rank() if group is not None else 0
        self._out: _Out | None = None

    def launch(self) -> None:
        """Sends the first chunk out. All ranks call it, and then :meth:`finish`; other work fits between them."""
        if self._plan.chunks:
            self._out = self._send_out(self._plan.chunks[0])

    def finish(self) -> None:
        """Updates momentums and parameters."""
        self._compute_whole()
        chunks = self._plan.chunks
        back: _Back | None = None
        for k in range(len(chunks)):
            arriving = self._out
            assert arriving is not None  # launch() comes first
            self._out = self._send_out(chunks[k + 1]) if k + 1 < len(chunks) else None
            previous, back = back, self._compute(arriving)
            if previous is not None:
                self._apply_back(previous)
        if back is not None:
            self._apply_back(back)

    def _compute_whole(self) -> None:
        for i, held in self._held(self._plan.whole_on(self._rank)).items():
            _apply(held, self._orthogonalize(i, [_advance(held)]))

    def _send_out(self, chunk: Sequence[int]) -> _Out:
        held = self._held(chunk)
        momentums = {i: _advance(each) for i, each in held.items()}
        outgoing = [(each.root, momentums[i]) for i, each in held.items() if each.root != self._rank]
        incoming = [
            (part.rank, part.stop - part.start)
            for i in self._rooted(chunk)
            for part in self._plan.matrices[i].parts
            if part.rank != self._rank
        ]
        own = {i: momentums[i] for i, each in held.items() if each.root == self._rank}
        return _Out(chunk, self._exchange(outgoing, incoming), own)

    def _compute(self, out: _Out) -> _Back:
        """Computes the chunk's matrices that this rank is the root of, and sends them back."""
        arrived = iter(out.exchange.wait())
        rooted = self._rooted(out.chunk)
        updates = {}
        for i in rooted:
            parts = self._plan.matrices[i].parts
            updates[i] = self._orthogonalize(i, [out.own[i] if p.rank == self._rank else next(arrived) for p in parts])
        outgoing = [
            (part.rank, updates[i][part.start : part.stop])
            for i in rooted
            for part in self._plan.matrices[i].parts
            if part.rank != self._rank
        ]
        held = self._held(out.chunk)
        away = [each for each in held.values() if each.root != self._rank]
        back = _Back(self._exchange(outgoing, [(each.root, each.numel) for each in away]), away)
        for i in out.own:
            _apply(held[i], updates[i][held[i].part.start : held[i].part.stop])
        return back

    def _apply_back(self, back: _Back) -> None:
        for held, update in zip(back.held, back.exchange.wait(), strict=True):
            _apply(held, update)

    def _held(self, chunk: Sequence[int]) -> dict[int, _Held]:
        """What this rank holds of a chunk's matrices; those that it holds nothing of are left out."""
        held = {}
        for i in chunk:
            matrix = self._plan.matrices[i]
            if (part := matrix.part_on(self._rank)) is not None:
                held[i] = _Held(matrix, part, self._plan.roots[i], self._shards[matrix.param])
        return held

    def _rooted(self, chunk: Sequence[int]) -> list[int]:
        return [i for i in chunk if self._plan.roots[i] == self._rank]

    def _exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, int]]) -> PackedExchange:
        assert self._group is not None
        device = self._shards[0].param.device
        return PackedExchange(outgoing, incoming, dtype=torch.bfloat16, device=device, group=self._group)

    def _orthogonalize(self, i: int, pieces: Sequence[Tensor]) -> Tensor:
        """The update of a matrix, flat, from the pieces that it consists of."""
        matrix = self._plan.matrices[i]
        options = self._shards[matrix.param].options
        iteration = NewtonSchulz(tuple(options["ns_coefficients"]), options["ns_steps"], options["eps"])
        # A concatenation copies, so that no momentum is overwritten.
        whole = torch.cat([piece.bfloat16() for piece in pieces]).view(matrix.shape)
        return orthogonalize(whole, iteration).reshape(-1)


def _advance(held: _Held) -> Tensor:
    """Takes the gradient into the momentum; returns what is to be orthogonalized, possibly the momentum itself."""
    grad, momentum = held.of(held.shard.grad), held.of(held.shard.momentum)
    decay = held.shard.options["momentum"]
    momentum.lerp_(grad, 1 - decay)
    return grad.lerp(momentum, decay) if held.shard.options["nesterov"] else momentum


def _apply(held: _Held, update: Tensor) -> None:
    options, param = held.shard.options, held.of(held.shard.param)
    lr = scalar_lr(options)
    param.mul_(1 - lr * options["weight_decay"])
    # In float32: on CPU, PyTorch adds bfloat16 tensors with another rounding where less than a vector of elements is
    # left, so that a cut would show in the bits. For parameters of other dtypes this changes nothing.
    param.add_(update.float(), alpha=-_adjusted(lr, options["adjust_lr_fn"], held.matrix.shape))


def _adjusted(lr: float | Tensor, adjust_lr_fn: str | None, shape: tuple[int, int]) -> Any:
    """Scales the learning rate by a matrix's shape.

    "original" as Jordan et al. (2024) do; "match_rms_adamw" to AdamW's update size, as Moonlight (arXiv 2502.16982).
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))
