"""Fixtures of the whole suite. Tests import this folder's helpers by name: ``from ranks import on_ranks``."""

from collections import Counter
from collections.abc import Iterator

import pytest
import ranks
from hypothesis import settings

from vescale_compile.frames import roomy

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of mostly slow tests come first: one that came last would keep a worker busy alone."""
    tests = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path] / tests[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """A test that compiles is quicker with room for its frames."""
    pyfuncitem.obj = roomy(pyfuncitem.obj)


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_their_own() -> Iterator[None]:
    """Ranks are shared by the tests of one file: what one file leaves in a process, no other sees."""
    yield
    ranks.shut_down()
