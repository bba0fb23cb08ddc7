"""Where compilers keep what they have compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache


@contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """AOTAutograd's cache; Inductor's stays where it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AOTAutogradCache, "_get_tmp_dir", classmethod(lambda cls: folder))
        yield
