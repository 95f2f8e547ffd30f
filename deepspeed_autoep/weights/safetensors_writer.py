"""Safetensors files whose tensors are written piece by piece: what goes where is known before the first value is."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import torch

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.weights.files import DTYPES
from deepspeed_autoep.weights.reversal import FileTensor

STORED_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def split_into_files(tensors: Iterable[FileTensor], max_bytes: int) -> list[list[FileTensor]]:
    """In order, each file at most ``max_bytes``; a larger tensor gets a file of its own, as save_pretrained does."""
    files: list[list[FileTensor]] = []
    current: list[FileTensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > max_bytes:
            files.append([tensor])
            continue
        if current and size + tensor.nbytes > max_bytes:
            current, size = [], 0
        if not current:
            files.append(current)
        current.append(tensor)
        size += tensor.nbytes
    return files


class SafetensorsWriter:
    """One file, made at its full size's layout: values may come in any order, whole or row by row, each once.

    Little-endian machines only, as all are that torch has wheels for.
    """

    def __init__(self, path: Path, tensors: list[FileTensor]) -> None:
        # Wide dtypes first: a tensor then starts at a multiple of its item size, which readers that map the file rely on.
        ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        for tensor in ordered:
            self._starts[tensor.name] = end
            header[tensor.name] = {
                "dtype": STORED_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path, self._left = path, end
        self._written: set[tuple[str, int | None]] = set()
        self._file = open(path, "xb")  # noqa: SIM115 (open until close)
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._data = self._file.tell()

    def write(self, tensor: FileTensor, value: torch.Tensor, row: int | None = None) -> None:
        """``value``: on the CPU, of ``tensor``'s dtype, of its shape or with ``row`` ``[1, *shape[1:]]``. Raises :class:`ModelError`."""
        shape = tensor.shape if row is None else (1, *tensor.shape[1:])
        if tuple(value.shape) != shape or value.dtype != tensor.dtype:
            raise ModelError(
                f"tensor {tensor.name!r} of {self.path.name} is {list(value.shape)} {value.dtype}, planned were {list(shape)} {tensor.dtype}"
            )
        if {(tensor.name, row), (tensor.name, None)} & self._written:
            raise ModelError(f"tensor {tensor.name!r} of {self.path.name} is written twice")
        self._written.add((tensor.name, row))
        if not value.numel():
            return  # the file may be closed already
        self._file.seek(self._data + self._starts[tensor.name] + (0 if row is None else row * tensor.row_bytes))
        self._file.write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        self._left -= math.prod(shape) * tensor.dtype.itemsize

    @property
    def complete(self) -> bool:
        return self._left == 0

    def close(self) -> None:
        """On disk. Raises :class:`ModelError` where values are missing."""
        if self._file.closed:
            return
        if not self.complete:
            self.abandon()
            raise ModelError(f"{self.path.name} lacks {self._left} bytes of values")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close it whatever is missing."""
        self._file.close()
