"""``checkpoint.json``: what a checkpoint holds, and by which sizes and checksums its files are known to be whole.

docs/checkpoints.md describes the format for other programs.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from deepspeed_autoep.errors import CheckpointError

MANIFEST = "checkpoint.json"
TENSORS = "tensors"  # folder of torch.distributed.checkpoint's files
TRAINING_STATE = "training_state.pt"
FORMAT, VERSION = "deepspeed_autoep", 1
_SHOWN = 5
_READ = 1 << 24  # bytes at a time


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Topology(_Entry):
    world_size: int
    tp: int
    ep: int
    etp: int
    zero_stage: int


class TensorEntry(_Entry):
    """A parameter or buffer of the model."""

    shape: tuple[int, ...]  # logical
    dtype: str  # as stored: of the fp32 master, where there is one
    model_dtype: str  # of the model's own tensor
    kind: Literal["parameter", "buffer"]
    trained: bool
    stored: bool = True  # false: frozen, and left out on request
    aliases: tuple[str, ...] = ()  # further names of the same tensor in the model's state dict


class GroupEntry(_Entry):
    """One parameter group as the user gave it."""

    parameters: tuple[str, ...]
    options: dict[str, Any]  # lr, weight_decay ...: see encode()


class OptimizerEntry(_Entry):
    type: str
    has_states: bool = True  # false: left out on request
    groups: tuple[GroupEntry, ...]
    states: dict[str, dict[str, str]]  # parameter -> state of its shape -> dtype; stored as tensors
    values: dict[str, dict[str, Any]]  # parameter -> other states (step), see encode()


class FileEntry(_Entry):
    bytes: int
    crc32: int


class Manifest(_Entry):
    format: Literal["deepspeed_autoep"] = FORMAT
    version: int = VERSION
    created: str  # UTC, ISO 8601
    libraries: dict[str, str]
    model: str  # class
    topology: Topology
    counters: dict[str, int]  # global_steps, global_samples, skipped_steps, pending_passes
    tensors: dict[str, TensorEntry]
    optimizer: OptimizerEntry | None
    loss_scale: dict[str, float] | None
    random_states: bool  # of every rank, under rng.<rank>
    files: dict[str, FileEntry] = {}  # all but checkpoint.json, relative to it


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{MANIFEST} has the dtype {name!r}, which this torch does not know")
    return dtype


def encode(value: Any, where: str) -> Any:
    """A number, text, tuple, list or small tensor as JSON. Raises :class:`CheckpointError` for anything else."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 1024:
            raise CheckpointError(f"{where} is a tensor of shape {list(value.shape)}: legal are tensors of the parameter's shape, and small ones")
        return {"tensor": value.tolist(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": repr(value)}
    if isinstance(value, tuple | list):
        items = [encode(item, where) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{where} is a {type(value).__name__}, which cannot be saved: legal are numbers, texts, tuples, lists and tensors")


def decode(value: Any) -> Any:
    """Undoes :func:`encode`; tensors are on the CPU."""
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["tensor"], dtype=dtype_of(value["dtype"]))
    if isinstance(value, dict) and "number" in value:
        return float(value["number"])
    if isinstance(value, dict) and "tuple" in value:
        return tuple(decode(item) for item in value["tuple"])
    return [decode(item) for item in value] if isinstance(value, list) else value


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content: the manifest and its own checksum."""
    content = manifest.model_dump(mode="json")
    return json.dumps({"crc32": _content_crc(content), "content": content}, indent=1).encode()


def _content_crc(content: dict) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> Manifest:
    """Raises :class:`CheckpointError` that names the file: missing, damaged, or of another version."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
        content, crc = document["content"], document["crc32"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {folder} is no checkpoint of deepspeed_autoep, or its save did not end") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if _content_crc(content) != crc:
        raise CheckpointError(f"{path} is damaged: its content has the CRC-32 {_content_crc(content)}, and it says {crc}")
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path} has the version {content.get('version')!r} of the format: legal is {VERSION}")
    try:
        return Manifest(**content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


def crc_of(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_READ):
            crc = zlib.crc32(block, crc)
    return crc


def damaged_files(folder: Path, files: dict[str, FileEntry], names: Iterable[str], checksums: bool = True) -> list[str]:
    """What is wrong with those of the ``files`` in ``names``, a sentence each; without ``checksums`` by their sizes only."""
    faults = []
    for name in names:
        path, entry = folder / name, files[name]
        try:
            size = os.stat(path).st_size
            if size != entry.bytes:
                faults.append(f"{path} has {size} bytes, {entry.bytes} were written")
            elif checksums and (crc := crc_of(path)) != entry.crc32:
                faults.append(f"{path} has the CRC-32 {crc}, {entry.crc32} was written: some of its bytes changed")
        except FileNotFoundError:
            faults.append(f"{path} is missing")
        except OSError as error:
            faults.append(f"{path} cannot be read: {error}")
    return faults


def surplus_files(folder: Path, files: dict[str, FileEntry]) -> list[str]:
    """Files among the tensors that the manifest does not know, a sentence each: of another save, or of another program."""
    found = sorted(f"{TENSORS}/{path.name}" for path in (folder / TENSORS).iterdir()) if (folder / TENSORS).is_dir() else []
    return [f"{folder / name} is not of this checkpoint" for name in found if name not in files]


def raise_damaged(folder: Path, faults: list[str]) -> None:
    """Raise :class:`CheckpointError` if there are ``faults``."""
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(faults[:_SHOWN])}{more}. Nothing was loaded")
