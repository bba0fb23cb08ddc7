"""Full parameters without a compiler: gathered by unit at first use, kept while a module runs.

The same gather and the same reduction as in a graph, so the numbers are the same. Autograd keeps what was
gathered until the backward has used it: eager mode is for debugging and for the parts of a model that can't be
compiled, and its memory is that of ``reshard_after_forward=False``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .agreement import agree_on_leaving_compiled_code
from .boundary import Binding, flat_input
from .dbuffer import DBuffer
from .model import Forward
from .streams import Reached
from .unshard import unshard
from .writes import Watch, memory_of, version_of


@dataclass
class _Gathered:
    """What one gather gave: views of one tensor."""

    key: tuple[bool | int, ...]
    params: tuple[Tensor, ...]
    memory: int
    version: int
    there: Reached | None  # on a GPU, by the stream that has gathered them
    watch: Watch  # of the shard: writes to an alias of it (``weight.detach()``) show in no version of its own

    def on_this_stream(self) -> tuple[Tensor, ...]:
        """The parameters; on a GPU for the current stream, which may be another than the one that has gathered them."""
        if self.there is not None and (reader := self.there.follow()) is not None:
            self.params[0].record_stream(reader)  # autograd may free them while it still reads
        return self.params

    def is_of(self, buffer: DBuffer) -> bool:
        """Whether it is what would be gathered now."""
        return self.key == _key(buffer) and not self.watch.written

    def written_to(self) -> bool:
        """Whether a parameter was, or given other memory (``weight.data = ...``), as PyTorch tells."""
        return version_of(self.params[0]) != self.version or any(memory_of(p) != self.memory for p in self.params)


_NO_MARKS = ("_vescale_", "_is_param", "_dynamo_")
"""Beginnings of attributes of a sharded parameter that a gathered one does not have: ours, and what Dynamo would take
for an input that stays where it is in memory."""

_open: dict[DBuffer, _Gathered | None] = {}
_running: list[list[DBuffer]] = []
"""What each running module has opened, the innermost one's last."""


@contextlib.contextmanager
def gathered_once(buffers: Iterable[DBuffer]) -> Iterator[None]:
    """While open, each of ``buffers``, and of others that are read meanwhile, is gathered once, however many of its
    parameters are read."""
    _running.append([])
    for buffer in buffers:
        _keep_open(buffer)
    try:
        yield
    except RuntimeError:
        # Autograd refuses to save what was written to, and doesn't know whose it is.
        for buffer in _running[-1]:
            _check_unwritten(buffer, _open[buffer])
        raise
    finally:
        closed = [(buffer, _open.pop(buffer)) for buffer in _running.pop()]
    for buffer, gathered in closed:
        _check_unwritten(buffer, gathered)


def _keep_open(buffer: DBuffer) -> None:
    """For as long as the innermost running module runs, unless one around it does already."""
    if buffer not in _open:
        _open[buffer] = None
        _running[-1].append(buffer)


@torch.compiler.disable
def unsharded(binding: Binding) -> Tensor:
    """The full parameter of ``binding``. A collective, unless its unit is open and was gathered already."""
    buffer, index = binding
    if _running:  # between two compiled graphs none does
        _keep_open(buffer)
    gathered = _open.get(buffer)
    if gathered is None or not gathered.is_of(buffer):
        _check_unwritten(buffer, gathered)
        gathered = _gather(buffer)
        if buffer in _open:
            _open[buffer] = gathered
    return gathered.on_this_stream()[index]


def _key(buffer: DBuffer) -> tuple[bool | int, ...]:
    """Changes with whatever makes a gathered copy unusable: autograd's modes, what is frozen, a write to the shard."""
    trainable = (param.requires_grad for param in buffer.params)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), version_of(buffer.shard), *trainable


def _gather(buffer: DBuffer) -> _Gathered:
    agree_on_leaving_compiled_code(buffer)
    found: list[int] = []  # in the backward that ran last; there may be several
    grads = torch.is_grad_enabled()
    forward = Forward(buffer.gathered_bytes, [buffer], compiled=False)
    flat = flat_input(buffer, buffer.params, used=found, forward=forward)
    views = [buffer.view_of(i, trainable=p.requires_grad) for i, p in enumerate(buffer.params)]
    # What is made in inference mode counts no writes.
    with torch.inference_mode(False), torch.set_grad_enabled(grads):
        params = unshard(flat, buffer.reductions_handle, views, buffer.comm(buffer.number), found=found)
    for param, shard in zip(params, buffer.params, strict=True):
        vars(param).update((name, mark) for name, mark in vars(shard).items() if not name.startswith(_NO_MARKS))
    there = Reached.by_now(params[0].device) if params[0].device.type == "cuda" else None
    memory, version, watch = memory_of(params[0]), version_of(params[0]), Watch([buffer.shard])
    return _Gathered(_key(buffer), params, memory, version, there, watch)


def _check_unwritten(buffer: DBuffer, gathered: _Gathered | None) -> None:
    """A gathered parameter is a copy: writing to it in a forward would be lost without a word."""
    if gathered is not None and gathered.written_to():
        raise RuntimeError(
            f"[rank {buffer.rank}] {buffer.name}: a parameter of this unit was written to inside forward. "
            "There it is a gathered copy, and the write would be lost: write to the sharded parameter outside "
            "forward, or keep the value in a buffer (register_buffer). To register a parametrization is a write, too: "
            "do so before fully_shard"
        )
