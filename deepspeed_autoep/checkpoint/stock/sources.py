"""Tensors put together of parts that lie in files. Each knows its shape and dtype without reading, and reads boxes of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from deepspeed_autoep.checkpoint.slices import Box, box_shape
from deepspeed_autoep.checkpoint.stock.files import StockFiles, pick_tensor
from deepspeed_autoep.compat import ParamAffineMap
from deepspeed_autoep.errors import CheckpointError


class Source(Protocol):
    """A tensor of ``shape`` and ``dtype``; :meth:`read` gives the elements of a box of it, perhaps as a view of a mapped file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, files: StockFiles, box: Box) -> torch.Tensor: ...


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


@dataclass(frozen=True)
class Stored:
    """One tensor of a file, under ``keys``; in the file it may be flat."""

    path: Path
    keys: tuple
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(files: StockFiles, path: Path, keys: tuple, shape: Sequence[int] | None = None) -> Stored:
        """With the ``shape`` that it must have, or a flat tensor of as many elements; without, that of the file."""
        tensor = pick_tensor(files.load(path), keys, path)
        found = tuple(tensor.shape)
        if shape is not None and found not in (tuple(shape), (prod(shape),)):
            where = "".join(f"[{key!r}]" for key in keys)
            raise CheckpointError(f"{path}{where} has the shape {list(found)}, {list(shape)} is expected")
        return Stored(path, keys, found if shape is None else tuple(shape), tensor.dtype)

    def read(self, files: StockFiles, box: Box) -> torch.Tensor:
        tensor = pick_tensor(files.load(self.path), self.keys, self.path)
        if tensor.numel() != prod(self.shape) or tensor.dtype != self.dtype:
            raise CheckpointError(f"{self.path} has changed since it was opened")
        return tensor.view(self.shape)[_slices(box)]


@dataclass(frozen=True)
class Fragment:
    """Elements ``[start, start + numel)`` of a flat tensor of a file."""

    path: Path
    keys: tuple
    start: int
    numel: int

    def read(self, files: StockFiles, start: int, stop: int) -> torch.Tensor:
        flat = pick_tensor(files.load(self.path), self.keys, self.path)
        if flat.dim() != 1 or self.start + self.numel > flat.numel():
            raise CheckpointError(f"{self.path} has changed since it was opened")
        return flat[self.start + start : self.start + stop]


@dataclass(frozen=True)
class Flat:
    """A tensor whose elements, in C order, are those of its ``fragments``, one after the other."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fragments: tuple[Fragment, ...]

    def read(self, files: StockFiles, box: Box) -> torch.Tensor:
        rows = box[0] if box else (0, 1)
        row = prod(self.shape[1:])
        start, stop = rows[0] * row, rows[1] * row
        parts, place = [], 0
        for fragment in self.fragments:
            low, high = max(start, place), min(stop, place + fragment.numel)
            if low < high:
                parts.append(fragment.read(files, low - place, high - place))
            place += fragment.numel
        if not parts:
            return torch.empty(box_shape(box), dtype=self.dtype)
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not box:
            return flat.view(())
        return flat.view(rows[1] - rows[0], *self.shape[1:])[_slices(((0, rows[1] - rows[0]), *box[1:]))]


@dataclass(frozen=True)
class Joined:
    """Parts one after the other along ``dim``; all of one dtype."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, files: StockFiles, box: Box) -> torch.Tensor:
        start, stop = box[self.dim]
        found, place = [], 0
        for part in self.parts:
            size = part.shape[self.dim]
            low, high = max(start, place), min(stop, place + size)
            if low < high:
                # A clone: of a mapped file only these elements are kept when the file is closed.
                inner = (*box[: self.dim], (low - place, high - place), *box[self.dim + 1 :])
                found.append(part.read(files, inner).clone())
            place += size
        if not found:
            return torch.empty(box_shape(box), dtype=self.dtype)
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


@dataclass(frozen=True)
class Row:
    """A tensor of shape [...] as one of shape [1, ...]."""

    of: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.of.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, files: StockFiles, box: Box) -> torch.Tensor:
        return self.of.read(files, box[1:])[None][slice(*box[0])]


@dataclass(frozen=True)
class Transposed:
    """[E, b, a] of [E, a, b]."""

    of: Source

    @property
    def shape(self) -> tuple[int, ...]:
        first, second, third = self.of.shape
        return first, third, second

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def read(self, files: StockFiles, box: Box) -> torch.Tensor:
        return self.of.read(files, (box[0], box[2], box[1])).transpose(1, 2)


@dataclass(frozen=True)
class Rebuilt:
    """A parameter that AutoTP cut, from the parts of the TP group's ranks in order. A box of it costs reading the whole of it.

    ``scale_power``: how a part's scale applies to this tensor, see DeepSpeed's ``SCALE_POWER_BY_STATE``.
    """

    name: str
    parts: tuple[Source, ...]
    affine: ParamAffineMap
    scale_power: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.affine.logical_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, files: StockFiles, box: Box) -> torch.Tensor:
        shards = {rank: part.read(files, whole(part.shape)).contiguous() for rank, part in enumerate(self.parts)}
        try:
            return self.affine.rebuild(shards, self.scale_power)[_slices(box)]
        except (ValueError, KeyError, NotImplementedError) as error:
            raise CheckpointError(f"{self.name!r} in {files.folder} cannot be put together of its {len(self.parts)} TP parts: {error}") from None


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)
