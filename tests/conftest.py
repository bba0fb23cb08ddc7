"""Fixtures of the whole suite. Tests import this folder's helpers by name: ``from ranks import on_ranks``."""

from collections.abc import Iterator

import pytest
import ranks


@pytest.fixture(scope="session", autouse=True)
def _no_ranks_left_behind() -> Iterator[None]:
    yield
    ranks.shut_down()
