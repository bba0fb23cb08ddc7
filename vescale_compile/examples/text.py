"""Bytes of text files as training data: one token for each byte, so there is no tokenizer to fetch."""

import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_FRACTION = 0.02
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
BINARY_PROBE_BYTES = 8192


def standard_library() -> Path:
    """Folder of the running Python's standard library: real text that is on every machine."""
    return Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True)
class Text:
    """The bytes of a folder's text files: two one-dimensional uint8 tensors that share no byte."""

    train: Tensor
    validation: Tensor


def read_text(folder: Path) -> Text:
    """Read all text files under `folder`; the last 2 % of the bytes are for validation.

    Files come in the order of a checksum of their relative paths: the same on every machine, and mixed, so
    that the last bytes are like the others. Left out are hidden files and folders, folders of installed
    packages and caches, and binary files (those with a zero byte among their first 8192).

    Raises:
        ValueError: the folder does not exist or holds no text.
    """
    if not folder.is_dir():
        raise ValueError(f"text folder {folder} is not a folder")
    content = bytearray()
    for path in _files(folder):
        data = path.read_bytes()
        if b"\0" not in data[:BINARY_PROBE_BYTES]:
            content += data
    if not content:
        raise ValueError(f"text folder {folder} holds no text files")
    every_byte = torch.frombuffer(content, dtype=torch.uint8)
    split = round(len(content) * (1 - VALIDATION_FRACTION))
    return Text(every_byte[:split], every_byte[split:])


def _files(folder: Path) -> list[Path]:
    found = {}
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if not hidden and SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.is_file():
            found[relative.as_posix()] = path
    return [found[name] for name in sorted(found, key=lambda name: (zlib.crc32(name.encode()), name))]


Batch = tuple[Tensor, Tensor]
"""Tokens, and as labels the byte after each: contiguous int64 tensors of shape [batch, length]."""


def batches(data: Tensor, *, batch: int, length: int, rank: int, world_size: int, seed: int) -> Iterator[Batch]:
    """Endless random batches of one rank.

    An epoch cuts `data`, from a random start, into windows whose labels do not overlap, shuffles them and
    deals them out, so that no two ranks and no two steps of an epoch learn the same byte. All ranks must
    give the same `data` and `seed`.

    Raises:
        ValueError: `data` is too short for one batch on every rank.
    """
    needed = (world_size * batch + 1) * length
    if len(data) < needed:
        raise ValueError(
            f"rank {rank}: the text has {len(data)} bytes, and a batch of {batch} windows of {length} bytes "
            f"on {world_size} ranks needs {needed}; give more text, or a smaller batch or length"
        )
    return _deal(data, batch, length, rank, world_size, seed)


def _deal(data: Tensor, batch: int, length: int, rank: int, world_size: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(length)
    while True:
        first = int(torch.randint(length, (), generator=generator))
        count = (len(data) - 1 - first) // length
        order = torch.randperm(count, generator=generator)
        dealt = order[: count - count % (world_size * batch)].view(-1, world_size, batch)[:, rank]
        for window in dealt:
            positions = (first + window * length)[:, None] + within
            yield data[positions].long(), data[positions + 1].long()
