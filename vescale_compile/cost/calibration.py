"""The result of a calibration, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vescale_compile.cost.cluster import MeasuredCollective
from vescale_compile.cost.devices import TO_CALIBRATE, Device

_FORMAT = "vescale_compile calibration 1"


@dataclass(frozen=True)
class Calibration:
    """What was measured on a machine, or on several together.

    Attributes:
        device: with the figures that it reached, so that its efficiencies are 1.
        ranks: that the collectives were measured on; 1 without collectives.
        collectives: by kind.
    """

    device: Device
    ranks: int
    collectives: Mapping[str, MeasuredCollective]

    def save(self, path: str | Path) -> None:
        """Writes a JSON file."""
        Path(path).write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what ``save`` has written.

        Raises:
            ValueError: the file is no calibration.
        """
        try:
            fields = json.loads(Path(path).read_text())
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}, not {_FORMAT!r}")
            collectives = {kind: MeasuredCollective(**each) for kind, each in fields["collectives"].items()}
            return cls(Device(**fields["device"]), fields["ranks"], collectives)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no calibration: {error}. Make one with {TO_CALIBRATE}") from error
