"""C++ kernels are compiled while code is generated, and waited for when all graphs have been lowered."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import fake_world
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache
from written import empty_cache

import vescale_compile as vc
from vescale_compile import backend

pytestmark = pytest.mark.slow  # left out of `make test-fast`


@pytest.fixture(autouse=True)
def one_of_two_ranks() -> Iterator[None]:
    """With empty caches."""
    torch._dynamo.reset()
    with fake_world(2), empty_cache():
        yield


class BetweenKernels(nn.Module):
    """A product, with a kernel before it and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.sin(x) @ self.weight).square().sum()


def first_step() -> None:
    torch.compile(vc.fully_shard(BetweenKernels()), backend="vescale")(torch.ones(4, 8)).backward()


def recorded(events: list[str], what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which writes down that it has returned."""

    def record(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        events.append(what)
        return result

    return record


def test_a_forwards_kernels_are_waited_for_when_its_backward_has_been_lowered() -> None:
    events: list[str] = []
    with (
        mock.patch.object(AsyncCompile, "wait", recorded(events, "waited", AsyncCompile.wait)),
        mock.patch.object(
            backend, "inductor_compile_inner", recorded(events, "lowered", backend.inductor_compile_inner)
        ),
    ):
        first_step()
    assert events == ["lowered", "lowered", "waited", "waited"]


def test_kernels_are_compiled_before_all_of_their_graph_has_been_generated() -> None:
    events: list[str] = []
    begin, load = CppPythonBindingsCodeCache.load_pybinding_async, PyCodeCache.load_by_key_path
    with (
        mock.patch.object(CppPythonBindingsCodeCache, "load_pybinding_async", recorded(events, "begun", begin)),
        mock.patch.object(PyCodeCache, "load_by_key_path", recorded(events, "loaded", load)),
    ):
        first_step()
    before = events[: events.index("loaded")]
    assert before.count("begun") >= 2 * 2  # by the generator, and by the code as it is loaded
    assert len(before) % 2 == 0


def test_what_the_compiler_fails_on_is_raised_before_the_model_runs() -> None:
    with (
        mock.patch.object(AsyncCompile, "wait", side_effect=RuntimeError("no such instruction")),
        pytest.raises(BackendCompilerFailed, match="no such instruction"),
    ):
        first_step()
