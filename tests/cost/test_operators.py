"""Operators measured one by one: what they are known by, and that they are believed before the roofline."""

from dataclasses import replace

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from vescale_compile.cost import Device
from vescale_compile.cost.compute import compute_seconds, operator_key
from vescale_compile.cost.operators import measure_operators

DEVICE = Device("cpu", {"float32": 1e9}, 1e9, None, 1.0, 1.0, 0.0)


def products(*shapes: tuple[int, int, int]) -> list[fx.Node]:
    """A graph of matrix products, each with a sum behind it."""

    def run(*factors: torch.Tensor) -> list[torch.Tensor]:
        return [torch.mm(a, b).relu() for a, b in zip(factors[::2], factors[1::2], strict=True)]

    factors = [torch.ones(size) for m, k, n in shapes for size in ((m, k), (k, n))]
    return list(make_fx(run, tracing_mode="fake")(*factors).graph.nodes)


def keys(nodes: list[fx.Node]) -> list[str]:
    return [operator_key(node) for node in nodes if node.target is torch.ops.aten.mm.default]


def test_equal_products_are_one_operator_and_others_are_not() -> None:
    first, second, third = keys(products((4, 8, 2), (4, 8, 2), (4, 8, 3)))
    assert first == second != third


def test_operators_with_arithmetic_are_measured_once_each() -> None:
    nodes = products((4, 8, 2), (4, 8, 2), (64, 64, 64))
    found = measure_operators(nodes)
    assert found.keys() == set(keys(nodes))
    assert all(0 < seconds < 1 for seconds in found.values())


def test_what_was_measured_is_believed_before_the_peak() -> None:
    nodes = products((4, 8, 2), (64, 64, 64))
    small, large = (node for node in nodes if node.target is torch.ops.aten.mm.default)
    device = replace(DEVICE, operators={operator_key(large): 7.0})
    seconds = compute_seconds(nodes, device)
    assert seconds[large] == 7.0
    assert seconds[small] == compute_seconds(nodes, DEVICE)[small]
