"""What an optimizer's step costs a rank: its memory and its memory traffic, in proportion to the rank's shards."""

from __future__ import annotations

from dataclasses import dataclass

from vescale_compile.cost.devices import Device


@dataclass(frozen=True)
class OptimizerCost:
    """An elementwise optimizer, its step one kernel bound by memory.

    Attributes:
        name: for reports.
        states: bytes kept between steps, for each byte of trained parameters.
        traffic: bytes that a step reads and writes, for each byte of trained parameters.
    """

    name: str
    states: float
    traffic: float

    def state_bytes(self, shard_bytes: int) -> int:
        """Of a rank with so many bytes of trained parameters."""
        return int(self.states * shard_bytes)

    def seconds(self, shard_bytes: int, device: Device) -> float:
        """Of a step of a rank with so many bytes of trained parameters."""
        return device.seconds(0, self.traffic * shard_bytes, "")


# AdamW reads the parameter, its gradient and both moments, and writes all but the gradient; SGD without momentum reads
# two and writes one; with it, three and two.
OPTIMIZERS: dict[str, OptimizerCost] = {
    each.name: each
    for each in (OptimizerCost("adamw", 2, 7), OptimizerCost("sgd", 0, 3), OptimizerCost("sgd-momentum", 1, 5))
}
