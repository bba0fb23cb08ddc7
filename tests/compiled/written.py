"""What Inductor writes for a graph, without what it takes to run it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache, run_and_get_code


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Inductor finds nothing that was compiled before, but for what vectors this machine has."""
    pick_vec_isa()  # kept for the process, it would be compiled anew in an empty folder
    with fresh_cache():
        yield


def code_written_for(run: Callable[[], Any]) -> list[str]:
    """The code of each graph that `run` compiles. C++ kernels are written and not compiled, which takes g++ half of the
    time: they do nothing, so what `run` computes means nothing."""
    with empty_cache(), mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=_compute_nothing):
        _, codes = run_and_get_code(run)
    return codes


def _compute_nothing(*_: object) -> None:
    pass
