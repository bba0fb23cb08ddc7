"""Where a GPU's streams meet: what one has reached, and another comes after."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Reached(NamedTuple):
    """A stream of a GPU, and what it has been given so far."""

    device: torch.device
    stream: torch.Stream
    so_far: torch.Event

    @classmethod
    def by_now(cls, device: torch.device) -> Reached:
        """By a GPU's current stream."""
        stream = torch.accelerator.current_stream(device)
        return cls(device, stream, stream.record_event())

    def follow(self) -> torch.Stream | None:
        """Has the current stream come after it: that stream, or None if it is the same one, which does so anyway."""
        current = torch.accelerator.current_stream(self.device)
        if current == self.stream:
            return None
        current.wait_event(self.so_far)
        return current
