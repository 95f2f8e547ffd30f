"""Files of a stock checkpoint: mapped into memory, a few at a time, without running what they hold."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from deepspeed_autoep.compat import STOCK_CLASSES
from deepspeed_autoep.errors import CheckpointError

_OPEN = 8  # files whose content is kept; of a mapped file that is little more than what is read of it
_DAMAGED = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, EOFError, OSError, zipfile.BadZipFile)


class StockFiles:
    """Reads the files of one checkpoint ``folder``.

    With ``trust_files`` a file may hold instances of any class, whose code then runs; without, only tensors, plain data and
    DeepSpeed's own classes.
    """

    def __init__(self, folder: Path, trust_files: bool = False) -> None:
        self.folder = folder
        self.trust_files = trust_files
        self._loaded: OrderedDict[Path, Any] = OrderedDict()

    def load(self, path: Path) -> Any:
        """The content of ``path``. Raises :class:`CheckpointError` that names the file: missing, damaged, or of unknown classes."""
        if path in self._loaded:
            self._loaded.move_to_end(path)
            return self._loaded[path]
        content = self._read(path)
        self._loaded[path] = content
        while len(self._loaded) > _OPEN:
            self._loaded.popitem(last=False)
        return content

    def load_dict(self, path: Path) -> dict:
        """As :meth:`load`, for a file that must hold a dictionary."""
        content = self.load(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__}: a dictionary is legal")
        return content

    def _read(self, path: Path) -> Any:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        try:
            # torch maps files of its newer format only, which are zip files.
            mapped = zipfile.is_zipfile(path)
            if self.trust_files:
                return torch.load(path, map_location="cpu", mmap=mapped, weights_only=False)
            with torch.serialization.safe_globals(list(STOCK_CLASSES)):
                return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except pickle.UnpicklingError as error:
            refused = re.search(r"(?:GLOBAL|type) ([\w.]+\.[\w.]+)", str(error))
            if refused is None:
                raise CheckpointError(f"{path} is damaged: {_first_line(error)}") from None
            raise CheckpointError(
                f"{path} holds an instance of {refused[1]}, which is not read: its code would run. If you trust the file, pass trust_files=True"
            ) from None
        except _DAMAGED as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def pick(content: Any, keys: tuple, path: Path) -> Any:
    """``content[keys[0]][keys[1]] ...``. Raises :class:`CheckpointError` that names ``path`` and the key that is not there."""
    for depth, key in enumerate(keys):
        try:
            content = content[key]
        except (KeyError, IndexError, TypeError):
            where = "".join(f"[{part!r}]" for part in keys[: depth + 1])
            raise CheckpointError(f"{path} lacks {where}") from None
    return content


def pick_tensor(content: Any, keys: tuple, path: Path) -> torch.Tensor:
    """As :func:`pick`, for what must be a tensor."""
    value = pick(content, keys, path)
    if not isinstance(value, torch.Tensor):
        where = "".join(f"[{part!r}]" for part in keys)
        raise CheckpointError(f"{path}{where} is a {type(value).__name__}: a tensor is legal")
    return value
