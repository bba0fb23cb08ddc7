"""Compute devices: what they do in a second at most, and which share of it programs reach.

Peaks are the vendors' published dense figures (without sparsity), per device. The efficiencies of the table are
assumptions, typical of large matrix products and of long copies; so is what a host takes to launch a kernel, by what
that of an H200 took (6.9 to 10.8 us). ``calibrate`` measures them for a device at hand.

Their memory is what PyTorch says of the boards, in GiB, which is neither a label's GB nor its GiB: an A100's
(tutorials/oom.md of litgpt; of 40 GB: PC2's page of its A100 nodes), an H100's (vLLM's issue 27508; an H800's is taken
to be alike), an H200's (bench/results/2026-11-27-h200-predicted.json), a B200's (torchao's pull request 4002) and an
MI300X's (AMD's ROCm blog of GPTQModel).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TO_CALIBRATE = "python -m vescale_compile doctor --calibrate FILE --ranks N, or the same under torchrun without --ranks"
"""How messages say to make a calibration."""


@dataclass(frozen=True)
class Device:
    """A compute device.

    Attributes:
        name: key of the table, or what a calibration calls it.
        peak_flops: by dtype, FLOP/s of dense matrix products; a multiplication and an addition are two. :meth:`peak`
            estimates other dtypes' from these.
        memory_bandwidth: bytes/s, reads and writes together.
        memory_bytes: capacity; None where the machine decides.
        compute_efficiency: share of ``peak_flops`` that large matrix products reach, in (0, 1].
        bandwidth_efficiency: share of ``memory_bandwidth`` that pointwise kernels reach, in (0, 1].
        launch_overhead: seconds that a kernel takes whatever it does.
        operators: by :func:`.compute.operator_key`, seconds of operators that were measured on it, which are believed
            before its peaks.
        float32_products: whether its library gives matrix products of half precision as the float32 that they are
            summed up in.
        issue: seconds that its host takes for a kernel of generated code, its output's allocation included, while the
            device may be at work on those before; 0 of a CPU, which is its own host.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: int | None
    compute_efficiency: float
    bandwidth_efficiency: float
    launch_overhead: float
    operators: Mapping[str, float] = field(default_factory=dict)
    float32_products: bool = False
    issue: float = 0.0

    def __post_init__(self) -> None:
        positive = {"memory_bandwidth": self.memory_bandwidth, **self.peak_flops}
        for what, value in positive.items():
            if not 0 < value < math.inf:
                raise ValueError(f"device {self.name!r}: {what} is {value}; it must be positive and finite")
        for what in ("compute_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, what) <= 1:
                raise ValueError(f"device {self.name!r}: {what} is {getattr(self, what)}; it must be in (0, 1]")
        for what in ("launch_overhead", "issue"):
            if not 0 <= getattr(self, what) < math.inf:
                raise ValueError(f"device {self.name!r}: {what} is {getattr(self, what)} s; give 0 or more")

    @property
    def has_host(self) -> bool:
        """Whether something else launches its kernels, which takes time."""
        return self.issue > 0

    def of_host(self, seconds: float) -> float:
        """What takes its host so long: nothing of a CPU, whose computation it is part of."""
        return seconds if self.has_host else 0.0

    def lacks(self, nbytes: int) -> int:
        """Bytes by which ``nbytes`` exceed its memory; 0 where they fit, and where that is not known."""
        return 0 if self.memory_bytes is None else max(0, nbytes - self.memory_bytes)

    def shared(self, ranks: float) -> Device:
        """What each of several ranks has of the device when all are at work on it; it takes no less for one alone."""
        share = max(1.0, ranks)
        return replace(
            self,
            peak_flops={dtype: peak / share for dtype, peak in self.peak_flops.items()},
            memory_bandwidth=self.memory_bandwidth / share,
            launch_overhead=self.launch_overhead * share,
            operators={key: seconds * share for key, seconds in self.operators.items()},
        )

    def peak(self, dtype: str) -> float:
        """FLOP/s of dense matrix products in a dtype.

        Programs compute in more dtypes than datasheets list and calibrations measure. One without a figure gets that of
        the narrowest dtype that is at least as wide, in which its products could be computed, or else of the widest;
        of two that are alike, the slower's. A device without any figures is bound by memory alone.
        """
        if dtype in self.peak_flops:
            return self.peak_flops[dtype]
        figures = [(_bits(name), peak) for name, peak in self.peak_flops.items()]
        least = min(_bits(dtype), max(figures, default=(0, 0.0))[0])
        return min((each for each in figures if each[0] >= least), default=(0, math.inf))[1]

    def seconds(self, flops: float, nbytes: float, dtype: str) -> float:
        """Time of one kernel: the larger of its arithmetic and its memory traffic (roofline), and the overhead.

        Args:
            flops: of matrix products and convolutions; a kernel without them is bound by memory.
            nbytes: read and written.
            dtype: of the factors, such as "bfloat16".
        """
        arithmetic = flops / (self.peak(dtype) * self.compute_efficiency) if flops else 0.0
        return max(arithmetic, nbytes / (self.memory_bandwidth * self.bandwidth_efficiency)) + self.launch_overhead


def _bits(dtype: str) -> int:
    """Width of a dtype, which is the first number in its name; a bool's is that of a byte."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


# What a host takes for a kernel of a step: 20 us fit steps of one H200 and its host (bench/results/2026-11-28-h200.md),
# where a kernel launched in a loop takes 7.
_ISSUE = 20e-6


def _gpu(name: str, flops: Mapping[str, float], bandwidth: float, gibibytes: float, *, nvidia: bool = True) -> Device:
    capacity = int(gibibytes * 2**30)
    return Device(name, flops, bandwidth, capacity, 0.65, 0.85, 4e-6, float32_products=nvidia, issue=_ISSUE)


_AMPERE = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 19.5e12}
_HOPPER = {
    "float8": 1978.9e12,
    "bfloat16": 989.4e12,
    "float16": 989.4e12,
    "tf32": 494.7e12,
    "float32": 66.9e12,
    "float64": 66.9e12,
}

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM.
        _gpu("a100", _AMPERE, 2.039e12, 79.15),
        # NVIDIA H100 Tensor Core GPU architecture whitepaper, SXM5.
        _gpu("h100", _HOPPER, 3.35e12, 79.11),
        # H800 SXM: an H100 with half the NVLink bandwidth; double precision is left out, it is cut down.
        _gpu("h800", {dtype: peak for dtype, peak in _HOPPER.items() if dtype != "float64"}, 3.35e12, 79.11),
        # NVIDIA H200 Tensor Core GPU datasheet, SXM.
        _gpu("h200", _HOPPER, 4.8e12, 139.80),
        # NVIDIA HGX B200 datasheet, an eighth of the system, dense.
        _gpu(
            "b200",
            {
                "float8": 4500e12,
                "bfloat16": 2250e12,
                "float16": 2250e12,
                "tf32": 1100e12,
                "float32": 80e12,
                "float64": 40e12,
            },
            8.0e12,
            178.35,
        ),
        # AMD Instinct MI300X datasheet; matrix cores.
        _gpu(
            "mi300x",
            {
                "float8": 2614.9e12,
                "bfloat16": 1307.4e12,
                "float16": 1307.4e12,
                "tf32": 653.7e12,
                "float32": 163.4e12,
                "float64": 163.4e12,
            },
            5.3e12,
            191.98,
            nvidia=False,
        ),
        # The A100's first board (same datasheet), with HBM2.
        _gpu("a100-40gb", _AMPERE, 1.555e12, 39.49),
    )
}


def device(name: str) -> Device:
    """One of ``DEVICES``.

    Raises:
        ValueError: it is not in the table.
    """
    if name not in DEVICES:
        raise ValueError(
            f"no device {name!r} in the table; it has {', '.join(DEVICES)}. "
            f"For another one, write a calibration and load that: {TO_CALIBRATE}"
        )
    return DEVICES[name]
