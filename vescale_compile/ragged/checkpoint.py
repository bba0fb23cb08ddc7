"""RaggedDTensors in distributed checkpoints: each rank's run of elements as boxes of the whole tensor.

``torch.distributed.checkpoint`` stores a tensor as axis-aligned boxes. A run of a row-major tensor of n
dimensions is at most 2n - 1 of them, each contiguous in the run, so that they are saved and loaded in place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from vescale_compile.ragged.dtensor import RaggedDTensor
from vescale_compile.ragged.placement import RaggedShardError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes

_SAVER = "torch.distributed.checkpoint.state_dict_saver"


def write_items(name: str, tensor: RaggedDTensor) -> list[WriteItem]:
    """What this rank saves: nothing, if it holds nothing.

    Raises:
        RaggedShardError: it is to be written to safetensors, and would be lost there. Such a file has one box by each
            name, of several the last; and HuggingFaceStorageWriter has all ranks write the same files, unless it is
            told otherwise.
    """
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    items = run_to_items(name, *tensor.interval, tensor.shape, properties)
    if items and (problem := _lost_in_safetensors(len(items), tensor)):
        raise RaggedShardError(
            f"[rank {dist.get_rank()}] {name} {tuple(tensor.shape)}: {problem}; or save whole tensors: what "
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) gives, "
            "called on every rank"
        )
    return items


def run_to_items(name: str, start: int, stop: int, shape: torch.Size, properties: TensorProperties) -> list[WriteItem]:
    """What is saved of the elements [start, stop) of a tensor: a box each."""
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
        )
        for chunk in _as_chunks(run_to_boxes(start, stop, shape))
    ]


def chunks(tensor: RaggedDTensor) -> list[ChunkStorageMetadata]:
    """The boxes that this rank holds, in the order of its local tensor."""
    return _as_chunks(_held_boxes(tensor))


def box(tensor: RaggedDTensor, index: MetadataIndex) -> torch.Tensor:
    """The box at ``index.offset``, aliasing the local tensor."""
    start = 0
    for offsets, sizes in _held_boxes(tensor):
        numel = math.prod(sizes)
        if index.offset is not None and offsets == tuple(index.offset):
            return tensor._local_tensor.detach()[start : start + numel].view(sizes)
        start += numel
    raise ValueError(f"{index.fqn}: no box of {tensor!r} starts at {index.offset}")


def _lost_in_safetensors(boxes: int, tensor: RaggedDTensor) -> str:
    """What is wrong with saving ``tensor``, of which this rank holds so many boxes, as is asked; "" if nothing is."""
    writer = arguments_of_save(inspect.currentframe()).get("storage_writer")
    if getattr(writer, "serialization_format", None) != SerializationFormat.SAFETENSORS:
        return ""
    kind = type(writer).__name__
    if boxes > 1:
        return (
            f"this rank holds elements {tensor.interval}, {boxes} boxes of it, and {kind} writes one of each tensor to "
            "safetensors. Shard between whole rows: "
            "fully_shard(granularity=lambda name, param: vc.Elements(math.prod(param.shape[1:])))"
        )
    if not getattr(writer, "save_distributed", True) and tensor.device_mesh.size() > 1:
        return f"{kind} has all ranks write the same files: give it save_distributed=True"
    return ""


def arguments_of_save(frame: FrameType | None) -> dict[str, Any]:
    """Those of the ``torch.distributed.checkpoint.save`` that asks, by a planner that does not say; {} if none does."""
    for caller, _ in walk_stack(frame):
        if caller.f_globals.get("__name__") == _SAVER and {"storage_writer", "process_group"}.issubset(caller.f_locals):
            return dict(caller.f_locals)
    return {}


def run_to_boxes(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """The elements [start, stop) of a row-major tensor of `shape`, in order, as boxes."""
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    row_shape = tuple(shape[1:])
    row = math.prod(row_shape)
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, begin, end, row_shape)
    head = _in_row(first, begin, row, row_shape) if begin else []
    first += bool(begin)
    rows = [((first, *(0 for _ in row_shape)), (last - first, *row_shape))] if first < last else []
    return head + rows + _in_row(last, 0, end, row_shape)


def _in_row(row: int, begin: int, end: int, row_shape: tuple[int, ...]) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in run_to_boxes(begin, end, row_shape)]


def _as_chunks(boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


def _held_boxes(tensor: RaggedDTensor) -> list[Box]:
    return run_to_boxes(*tensor.interval, tensor.shape)
