"""How ``torch.distributed.checkpoint`` checks a plan.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_validate = default_planner._validate_global_plan
_one_at_a_time = threading.Lock()  # dcp.async_save may plan in a thread


@contextmanager
def checked_already(is_whole: Callable[[TensorStorageMetadata], bool]) -> Iterator[None]:
    """Inside it ``DefaultSavePlanner`` compares the pieces of those tensors alone that are not ``is_whole``."""

    def validate_others(plans: list[Any], metadata: Metadata) -> Any:
        others = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if not (isinstance(stored, TensorStorageMetadata) and is_whole(stored))
        }
        return _validate(plans, dataclasses.replace(metadata, state_dict_metadata=others))

    with _one_at_a_time, mock.patch.object(default_planner, "_validate_global_plan", validate_others):
        yield
