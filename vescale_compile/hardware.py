"""Which cluster the compiler predicts for: the one that the user names, or what this machine seems to be."""

from __future__ import annotations

import functools
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import torch

from .cost import PRESETS, Calibration, Cluster, Device, Link
from .cost.devices import DEVICES, TO_CALIBRATE

_log = logging.getLogger(__name__)

# One thread of a server's core, and a network between processes of one machine: round figures. A calibration has better
# ones.
_CPU = Device("cpu", {"float32": 60e9, "bfloat16": 30e9, "float64": 30e9}, 8e9, None, 1.0, 1.0, 10e-6)
_LOOPBACK = Link("loopback", 2e9, 200e-6, load=0.3)
_UNKNOWN_GPU = "h100"


def cluster_for(wanted: str | Cluster | None, device: torch.device, ranks: int) -> Cluster:
    """The cluster that schedules are made for.

    Args:
        wanted: a :class:`Cluster`, the name of a preset, the path of a calibration file, or None for a guess from
            ``device``.
        device: of the parameters.
        ranks: that shard them.

    Raises:
        ValueError: no such preset and no such file, a file that is no calibration of so many ranks, or a cluster whose
            collectives were measured on others.
    """
    if isinstance(wanted, Cluster):
        if wanted.measured and wanted.ranks != ranks:
            raise ValueError(
                f"vescale option cluster={str(wanted)!r}: its collectives were measured on {wanted.ranks} ranks, and "
                f"{ranks} shard the parameters. Leave measured= out, for what its links make of them"
            )
        return replace(wanted, ranks=ranks)
    if wanted is None:
        return _guess(device, ranks)
    if wanted in PRESETS:
        return PRESETS[wanted](ranks)
    if not Path(wanted).is_file():
        raise ValueError(
            f"vescale option cluster={wanted!r}: it is neither a preset ({', '.join(PRESETS)}) nor a calibration file"
        )
    measured = Calibration.load(wanted)
    if measured.ranks not in (1, ranks):
        raise ValueError(
            f"vescale option cluster={wanted!r}: its collectives were measured on {measured.ranks} ranks, and {ranks} "
            f"shard the parameters. Calibrate on as many: {TO_CALIBRATE}"
        )
    links = _guess(device, ranks) if device.type == "cuda" else _links_of(measured, wanted, ranks)
    return replace(links, device=measured.device, measured=measured.collectives)


def _links_of(calibration: Calibration, path: str, ranks: int) -> Cluster:
    """What was not measured goes over the links that this machine seems to have, or, where a GPU's calibration is used
    on a machine that need not have any, over those of the preset of that GPU.

    Raises:
        ValueError: of a GPU that there is no preset of, and without collectives.
    """
    name = calibration.device.name
    if (known := _preset_of(name, calibration.device.memory_bytes)) is not None:
        return PRESETS[known](ranks)
    if name.startswith("cpu") or calibration.collectives:
        return _guess(torch.device("cpu"), ranks)
    raise ValueError(
        f"vescale option cluster={path!r}: it is of a {name!r}, and no preset ({', '.join(PRESETS)}) says what links "
        f"such GPUs have. Calibrate on {ranks} ranks, or give a vescale_compile.cost.Cluster with its device and your "
        "links"
    )


def _guess(device: torch.device, ranks: int) -> Cluster:
    """Another rank's may be another: hosts have other GPUs, or other numbers of ranks. What is decided is agreed on."""
    if device.type != "cuda":
        return Cluster(_CPU, ranks, ranks, _LOOPBACK, _LOOPBACK)
    name = torch.cuda.get_device_name(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    known = _preset_of(name, memory)
    if known is None:
        _warn_unknown(name)
    guess = PRESETS[known or _UNKNOWN_GPU](ranks)
    return replace(
        guess,
        device=replace(guess.device, memory_bytes=memory),
        ranks_per_node=_ranks_per_node() or guess.ranks_per_node,
    )


def _preset_of(name: str, memory: int | None = None) -> str | None:
    """Of a GPU by its name, as PyTorch gives it, and of boards of one name by their memory, of which the bandwidth
    depends. Presets are of boards whose GPUs NVLink joins all: not of PCIe cards and pairs of them, nor of chips that
    share a name's letters (GH200)."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    if {"pcie", "nvl"} & {*words}:
        return None
    boards = [preset for preset in PRESETS if preset.partition("-")[0] in words]
    if memory is None:
        return next(iter(boards), None)
    return min(boards, key=lambda preset: abs((DEVICES[preset].memory_bytes or 0) - memory), default=None)


def _ranks_per_node() -> int | None:
    """What the launcher says, or one for each GPU; None where a process sees a GPU alone, maybe of those that its node
    has for others."""
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    if launched.isdecimal() and int(launched):
        return int(launched)
    seen = torch.cuda.device_count()
    return seen if seen > 1 else None


@functools.cache
def _warn_unknown(name: str) -> None:
    _log.warning(
        "backend='vescale' has no figures for a %r: it schedules as for %s. Give options={'cluster': ...}, a preset or "
        "the file of a calibration (%s).",
        name,
        _UNKNOWN_GPU,
        TO_CALIBRATE,
    )
