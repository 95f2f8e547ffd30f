"""A Hugging Face folder of safetensors files: what is in it, and reading one tensor, or some of its rows."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from deepspeed_autoep.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OPEN_FILES = 2  # mapped at a time: tensors of one layer may lie in two files
# safetensors' names (its README, "Format") -> torch's.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, by its header."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: one that is no model's own, such as fp8
    stored: str  # as the file names the dtype


@dataclass
class SafetensorsFolder:
    """All tensors of a folder. Opening reads headers only."""

    source: str
    tensors: dict[str, StoredTensor]
    _handles: OrderedDict = field(default_factory=OrderedDict)

    @staticmethod
    def open(source: str) -> SafetensorsFolder:
        """``source``: a folder with ``model.safetensors.index.json`` or ``*.safetensors``, or one such file.

        Raises :class:`ConfigError` that names the path: missing, empty, unreadable, or without a tensor that the index lists.
        """
        root = Path(source).expanduser()
        indexed = _indexed(root / _INDEX) if (root / _INDEX).is_file() else None
        if indexed is not None:
            paths = sorted({root / name for name in indexed.values()})
        elif root.is_file():
            paths = [root]
        else:
            paths = [root / _SINGLE] if (root / _SINGLE).is_file() else sorted(root.glob("*.safetensors"))
        if not paths:
            what = "a folder without *.safetensors files" if root.is_dir() else "neither a folder nor a file"
            raise ConfigError(f"expert_parallel.initial_weights={source!r} is {what}: legal are a folder that save_pretrained wrote, or one file")

        folder = SafetensorsFolder(source, {})
        for path in paths:
            folder._read_header(path)
        lost = sorted(set(indexed or ()) - set(folder.tensors))
        if lost:
            raise ConfigError(f"{root / _INDEX} lists {len(lost)} tensors that its files do not hold, first {lost[0]!r} in {indexed[lost[0]]}")
        return folder

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in list(file.keys()):
                    if name in self.tensors:
                        raise ConfigError(f"tensor {name!r} is in two files: {self.tensors[name].path} and {path}")
                    piece = file.get_slice(name)
                    stored = piece.get_dtype()
                    self.tensors[name] = StoredTensor(path, tuple(piece.get_shape()), DTYPES.get(stored), stored)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as a safetensors file: {error}") from None

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """The tensor, or ``[row : row + 1]`` of it: a view of the mapped file, to be copied by the caller."""
        piece = self._handle(self.tensors[name].path).get_slice(name)
        return piece[...] if row is None else piece[row : row + 1]

    def _handle(self, path: Path):
        if path not in self._handles:
            while len(self._handles) >= _OPEN_FILES:
                self._handles.popitem(last=False)
            self._handles[path] = safe_open(path, framework="pt")
        self._handles.move_to_end(path)
        return self._handles[path]

    def close(self) -> None:
        self._handles.clear()

    def digest(self) -> str:
        """Of all names, shapes and dtypes: ranks that read different folders differ in it."""
        lines = [f"{name} {tensor.shape} {tensor.stored}" for name, tensor in sorted(self.tensors.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _indexed(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not an index of safetensors files: {error!r}") from None
