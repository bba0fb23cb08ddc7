"""What a step has a GPU's host do besides launching kernels, in seconds.

Figures are those of PyTorch 2.11, rounded, on the host of an H200 (bench/results/2026-11-28-h200.md) and on hosts whose
GPU is a library that does nothing. It is Python's time, whatever the GPU. A CPU is its own host: there all this is part
of the computation.
"""

UNIT = 20e-6
"""For each unit of a collective, beside the collective's call: its operators, and its place among those it is joined
with."""

PARAMETER_READ = 20e-6
"""For each parameter that a graph reads, before it runs: Dynamo's guards on it, and its place in its unit's shard."""

PARAMETER_GRADIENT = 28e-6
"""For each parameter that a graph has a gradient of, after it has run: the gradient as a DTensor, and autograd's."""

PARAMETER_UPDATE = 18e-6
"""For each trained parameter in an optimizer's step: its place in the lists of tensors that a fused kernel takes."""
