"""Fixtures of the whole suite. Tests import this folder's helpers by name: ``from ranks import on_ranks``."""

from collections.abc import Iterator

import pytest
import ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_their_own() -> Iterator[None]:
    """Ranks are shared by the tests of one file: what one file leaves in a process, no other sees."""
    yield
    ranks.shut_down()
