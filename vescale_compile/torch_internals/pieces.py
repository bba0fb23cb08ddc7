"""What PyTorch asks for piece by piece, and adds up: the norms of tensors one by one, or of those of each dtype.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0: no public function says what all is asked for.
"""

from __future__ import annotations

import inspect
from traceback import walk_stack
from types import FrameType

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

_TOTAL_NORM = inspect.unwrap(clip_grad._get_total_norm).__code__
_UNSCALE = GradScaler._unscale_grads_.__code__


def asked_for_together(frame: FrameType | None) -> list[Tensor]:
    """All tensors that what runs in a frame is asked about piece by piece; none if it isn't.

    By ``torch.nn.utils``' total norm of gradients, or by a GradScaler, which takes the gradients of an optimizer.
    """
    for caller, _ in walk_stack(frame):
        if caller.f_code is _TOTAL_NORM:
            return caller.f_locals["tensors"]
        if caller.f_code is _UNSCALE:
            groups = caller.f_locals["optimizer"].param_groups
            return [param.grad for group in groups for param in group["params"] if param.grad is not None]
    return []
