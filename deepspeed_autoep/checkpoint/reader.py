"""A checkpoint read by one process, without an engine: a tensor, or a box of it, at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from deepspeed_autoep.checkpoint import folders
from deepspeed_autoep.checkpoint.metadata import (
    MANIFEST,
    TENSORS,
    Manifest,
    damaged_files,
    dtype_of,
    raise_damaged,
    read_manifest,
    surplus_files,
)
from deepspeed_autoep.checkpoint.planner import box_of
from deepspeed_autoep.checkpoint.slices import Box, box_shape, check_union, show
from deepspeed_autoep.checkpoint.tensors import WEIGHT, key_of
from deepspeed_autoep.errors import CheckpointError


@dataclass(frozen=True)
class StoredSlice:
    """A box of a logical tensor and where it is: ``bytes`` of ``file`` from ``offset``, a tensor of its own as torch.save writes it."""

    box: Box
    file: str
    offset: int
    bytes: int


class CheckpointReader:
    """``folder``: of one checkpoint, or a save folder, of which ``tag`` is read, or what ``latest`` names.

    Raises :class:`CheckpointError` that names the file: missing, damaged, or slices that do not make up a tensor. Checksums are
    compared by :meth:`verify`.
    """

    def __init__(self, folder: str | Path, tag: str | None = None) -> None:
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder: legal are a checkpoint's, and one of checkpoints")
        if tag is None and not (folder / MANIFEST).exists():
            tag = folders.latest_tag(folder)
            present = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
            if tag is None and present:
                raise CheckpointError(f"{folder} has the checkpoints {present} and no file {folders.LATEST!r}: say which")
        self.folder = folder if tag is None else folders.find(folder, tag)
        self.manifest: Manifest = read_manifest(self.folder)
        faults = damaged_files(self.folder, self.manifest.files, self.manifest.files, checksums=False)
        raise_damaged(self.folder, faults + surplus_files(self.folder, self.manifest.files))
        # It is a pickle, so its bytes are compared before it is read.
        index = f"{TENSORS}/.metadata"
        raise_damaged(self.folder, damaged_files(self.folder, self.manifest.files, [index] if index in self.manifest.files else []))
        self._metadata = FileSystemReader(self.folder / TENSORS).read_metadata()
        self._piece: tuple[StoredSlice, torch.Tensor] | None = None  # the last one read: boxes of one follow each other

    def verify(self) -> Iterator[tuple[str, int]]:
        """Read every file for its checksum; yields (name, bytes) after each. Then check that the slices make up every tensor."""
        faults = []
        for name, entry in self.manifest.files.items():
            faults += damaged_files(self.folder, self.manifest.files, [name])
            yield name, entry.bytes
        raise_damaged(self.folder, faults)
        for name in self.tensors():
            for state in self.states(name):
                slices = self.slices(name, state)
                check_union(key_of(name, state), self.manifest.tensors[name].shape, [(piece.box, 0) for piece in slices])

    def tensors(self) -> list[str]:
        """Names of the parameters and buffers whose values are here, as in the model's state dict."""
        return [name for name, entry in self.manifest.tensors.items() if entry.stored]

    def states(self, name: str) -> dict[str, torch.dtype]:
        """What is stored of a tensor: its value, "model", and its optimizer's states."""
        found = {WEIGHT: dtype_of(self.manifest.tensors[name].dtype)}
        if self.manifest.optimizer is not None:
            found |= {state: dtype_of(dtype) for state, dtype in self.manifest.optimizer.states.get(name, {}).items()}
        return found

    def slices(self, name: str, state: str = WEIGHT) -> list[StoredSlice]:
        key = key_of(name, state)
        stored = self._metadata.state_dict_metadata.get(key)
        if math.prod(self.manifest.tensors[name].shape) == 0:
            return []
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder / TENSORS / '.metadata'} has no tensor {key!r}")
        return [self._slice(key, position, chunk) for position, chunk in enumerate(stored.chunks)]

    def _slice(self, key: str, position: int, chunk: ChunkStorageMetadata) -> StoredSlice:
        place = self._metadata.storage_data[MetadataIndex(key, chunk.offsets, position)]
        return StoredSlice(box_of(chunk), f"{TENSORS}/{place.relative_path}", place.offset, place.length)

    def read(self, name: str, state: str = WEIGHT, box: Box | None = None) -> torch.Tensor:
        """The tensor, or ``box`` of it, on the CPU in the dtype in which it is stored. Beside it one slice is in memory."""
        shape = self.manifest.tensors[name].shape
        wanted = tuple((0, size) for size in shape) if box is None else box
        if len(wanted) != len(shape) or any(not 0 <= start <= stop <= size for (start, stop), size in zip(wanted, shape, strict=True)):
            raise CheckpointError(f"{show(wanted)} is no slice of {name!r}, which has shape {list(shape)}")
        result = torch.empty(box_shape(wanted), dtype=self.states(name)[state])
        filled = 0
        for piece in self.slices(name, state):
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, piece.box, strict=True))
            if all(low < high for low, high in common):
                part = self._load(piece)[_within(common, piece.box)]
                result[_within(common, wanted)] = part
                filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(f"the slices of {key_of(name, state)!r} hold {filled} of {result.numel()} elements of {show(wanted)}")
        return result

    def _load(self, piece: StoredSlice) -> torch.Tensor:
        if self._piece is None or self._piece[0] != piece:
            self._piece = None
            with open(self.folder / piece.file, "rb") as file:
                file.seek(piece.offset)
                value = torch.load(_Part(file, piece.offset, piece.bytes), map_location="cpu", weights_only=True)
            self._piece = piece, value
        return self._piece[1]


def _within(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(low - base, high - base) for (low, high), (base, _) in zip(box, outer, strict=True))


class _Part:
    """Bytes ``[offset, offset + length)`` of a file, as a file."""

    def __init__(self, file, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def seek(self, place: int, whence: int = 0) -> int:
        self._place = place + (0, self._place, self._length)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._place)
        self._file.seek(self._offset + self._place)
        content = self._file.read(left if size < 0 else min(size, left))
        self._place += len(content)
        return content

    def readinto(self, buffer) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readline(self) -> bytes:
        return b"".join(itertools.takewhile(lambda byte: byte not in (b"", b"\n"), iter(lambda: self.read(1), None)))


class ModelTensors:
    """The model of a checkpoint as its Hugging Face files hold it: the source of an export, see :mod:`deepspeed_autoep.weights.export`.

    ``dtype``: of floating-point parameters; None: each in its own of the model that was trained.
    """

    def __init__(self, reader: CheckpointReader, dtype: torch.dtype | None = None) -> None:
        left_out = [name for name, entry in reader.manifest.tensors.items() if not entry.stored]
        if left_out:
            raise CheckpointError(f"checkpoint {reader.folder} was saved with exclude_frozen_parameters and lacks {len(left_out)} tensors, first {left_out[0]!r}")
        self._reader, self._dtype = reader, dtype

    def names(self) -> list[str]:
        return self._reader.tensors()

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        entry = self._reader.manifest.tensors[name]
        own = dtype_of(entry.model_dtype)
        cast = self._dtype is not None and own.is_floating_point and entry.kind == "parameter"
        return entry.shape, self._dtype if cast else own

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        shape, dtype = self.describe(name)
        box = None if expert is None else ((expert, expert + 1), *((0, size) for size in shape[1:]))
        return self._reader.read(name, box=box).to(dtype)
