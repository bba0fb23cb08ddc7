"""Many runs of elements between many ranks in one asynchronous all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor


class PackedExchange:
    """An uneven all-to-all in flight. Every rank of the group makes one, with runs to send or without.

    What one rank sends another must be what that one expects of it, in the same order.

    Args:
        outgoing: ``(rank in the group, its elements)``, 1-D tensors of any floating-point dtype; copied.
        incoming: ``(rank in the group, number of elements)`` of each run to receive.
        dtype: what elements are cast to, and travel in.
        device: of the received elements.
        group: the process group, whose timeout is the deadline of :meth:`wait`.
    """

    def __init__(
        self,
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._incoming = incoming
        runs = [run for _, run in sorted(outgoing, key=itemgetter(0))]
        sent = _splits([(rank, run.numel()) for rank, run in outgoing], group.size())
        received = _splits(incoming, group.size())
        # Kept until the wait: the collective reads it until then.
        self._sent = torch.empty(sum(sent), dtype=dtype, device=device)
        if runs:
            torch._foreach_copy_(list(self._sent.split([run.numel() for run in runs])), runs)
        self._received = torch.empty(sum(received), dtype=dtype, device=device)
        self._work = dist.all_to_all_single(self._received, self._sent, received, sent, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """The received runs, in the order of ``incoming``: views of one buffer, ready on the current stream."""
        self._work.wait()
        order = sorted(range(len(self._incoming)), key=lambda i: self._incoming[i][0])
        runs = self._received.split([self._incoming[i][1] for i in order])
        arrived = dict(zip(order, runs, strict=True)) if order else {}
        return [arrived[i] for i in range(len(self._incoming))]


def _splits(runs: Sequence[tuple[int, int]], world_size: int) -> list[int]:
    splits = [0] * world_size
    for rank, numel in runs:
        splits[rank] += numel
    return splits
