"""What a step has a GPU's host do besides launching kernels, in the time that one such launch takes it.

Figures are those of PyTorch 2.11 on the host of an H200 (bench/results/2026-11-28-h200.md), and of hosts whose GPU is
none, rounded. A CPU is its own host, whose computation they are part of.
"""

UNIT = 2.0
"""For each unit of a collective, beside the collective's call: its operators, and its place among those it is joined
with."""

PARAMETER_READ = 1.0
"""For each parameter that a graph reads, before it runs: Dynamo's guards on it, and its place in its unit's shard."""

PARAMETER_GRADIENT = 1.4
"""For each parameter that a graph has a gradient of, after it has run: the gradient as a DTensor, and autograd's."""

PARAMETER_UPDATE = 0.9
"""For each trained parameter in an optimizer's step: its place in the lists of tensors that a fused kernel takes."""
