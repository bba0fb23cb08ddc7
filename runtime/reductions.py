"""What a unit's reductions need beside the gradients of one backward: those that accumulated before, and how to round.

A graph serves every unit that is laid out alike, so it takes, beside a unit's shard, a tensor that names the unit's
:class:`Reductions`. It serves forwards inside ``no_sync`` and outside: whether a backward's gradients are reduced or
held back says the autograd node that will receive them, which is the forward's own. What a graph has saved need not be,
where it runs again in a checkpointed region.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_internals.autograd import ReceivesGradients, backward_node, left_out, will_run
from .rounding import Rounding

_numbers = itertools.count()


class Reductions:
    """Those of one unit.

    Attributes:
        rounding: the stream that quantized gradients are rounded by.
        handle: [1] int64 on the CPU: names this in graphs.
        unreduced: [world_size * S] in the reduction's dtype: the sum of gradients that were held back, which the next
            reduction adds to what it sends; None if there are none.
    """

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding
        self.unreduced: Tensor | None = None
        self._held: set[int] = set()
        self._sent: set[int] = set()
        self._alike = True
        self._trained: frozenset[int] | None = None
        self._froze = False
        number = next(_numbers)
        self.handle = torch.tensor([number], device="cpu")
        _living[number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Reductions:
        """Those of a copied unit, which has no gradients."""
        return Reductions(copy.copy(self.rounding))

    def hold(self, full: Tensor) -> None:
        """Adds an unreduced gradient [world_size * S], in one kernel; :meth:`held` says of which parameters."""
        if self.unreduced is None:
            self.unreduced = full.clone()
        else:
            self.unreduced.add_(full)

    def read(self, trained: frozenset[int]) -> None:
        """Takes down which parameters are not frozen where a forward reads them, as all ranks' do."""
        self._froze = self._froze or self._trained not in (None, trained)
        self._trained = trained

    def held(self, params: set[int], *, alike: bool) -> None:
        """Takes down the indices of parameters whose gradients were held back, and whether they are the same on all
        ranks that held any back."""
        self._held |= params
        self._alike = self._alike and alike

    def holds_back(self, param: int) -> bool:
        """Whether gradients of the parameter of that index are held back."""
        return param in self._held

    def take(self) -> Tensor | None:
        """Returns the sum, which is about to be sent, and forgets it."""
        taken, self.unreduced = self.unreduced, None
        self._sent |= self._held
        self._held = set()
        return taken

    def sent(self) -> tuple[set[int], bool]:
        """The parameters of what was taken since the last call, and whether they are the same on all ranks: not if
        parameters were frozen meanwhile, or no more, and a rank held nothing back before."""
        found = self._sent, (self._alike or not self._sent) and not self._froze
        self._sent, self._alike, self._froze = set(), self._alike or not self._held, False
        return found

    def forget(self) -> None:
        """Drops what was held back."""
        self.take()
        self.sent()

    def forget_some(self, places: Mapping[int, tuple[int, int]]) -> None:
        """Drops what was held back of some parameters: by index, where its gradient begins in the unreduced one, and
        how many elements it has."""
        if self.unreduced is not None:
            for start, numel in places.values():
                self.unreduced.narrow(0, start, numel).zero_()
        self._held -= places.keys()


_living: WeakValueDictionary[int, Reductions] = WeakValueDictionary()


def reductions_of(handle: Tensor) -> Reductions:
    """What a handle names; its unit is alive while a graph runs with it."""
    return _living[int(handle.item())]


@torch.no_grad()
def held_back(full: Tensor, shard: Tensor, handle: Tensor | None) -> bool:
    """Whether a gradient is not to be reduced now, and was added to those that are held back, if anybody wants it.

    Args:
        full: the gradient, [world_size * S].
        shard: [S], for what is reduced of it; zeros where nothing is, which nobody reads but autograd's anomaly mode.
        handle: of the unit's reductions; None where nothing ever accumulates, and nothing is quantized.
    """
    if handle is None:
        return False
    receiver = _receiver(reductions_of(handle))
    if receiver is None or receiver.reduces:
        return False
    if _comes_to(receiver):
        reductions_of(handle).hold(full)
    shard.zero_()
    return True


def add_held(full: Tensor, handle: Tensor | None) -> None:
    """Adds what was held back to a gradient that is about to be reduced, [world_size * S], unless nobody wants that."""
    if handle is None or (reductions := reductions_of(handle)).unreduced is None:
        return
    receiver = _receiver(reductions)
    if (receiver is None or _comes_to(receiver)) and (total := reductions.take()) is not None:
        full.add_(total)


def _comes_to(receiver: ReceivesGradients) -> bool:
    """Whether the backward that is running is for the gradients of a unit that accumulates.

    Raises:
        RuntimeError: it is for some of them, and would add to all, or returns them.
    """
    if not will_run(receiver):
        return False
    if others := left_out(receiver):
        buffer, slot = others[0]._vescale_binding
        raise RuntimeError(
            f"[rank {dist.get_rank()}] parameter {buffer.slots[slot].name}: inside no_sync, and in the first backward "
            f"after it, the gradients of unit {buffer.name} accumulate together, and this backward does not add to "
            "this parameter's .grad: backward(inputs=...) leaves it out, or torch.autograd.grad is called. Name all of "
            "the unit's parameters in inputs, or take these gradients where nothing has accumulated"
        )
    return True


_receivers: WeakKeyDictionary[Any, dict[Reductions, ReceivesGradients]] = WeakKeyDictionary()
"""By autograd node, looked through once: a node of a whole model's graph gives gradients to each of its units."""


def _receiver(reductions: Reductions) -> ReceivesGradients | None:
    """What will receive the unit's gradients; None outside of backwards."""
    if (node := backward_node()) is None:
        return None
    if (found := _receivers.get(node)) is None:
        # Programs have autograd functions of their own, which may keep a buffer too.
        others = ((getattr(getattr(each, "buffer", None), "reductions", None), each) for each, _ in node.next_functions)
        found = _receivers[node] = {its: each for its, each in others if isinstance(its, Reductions)}
    return found.get(reductions)
