"""Read a checkpoint: everything is checked before anything is changed."""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from deepspeed_autoep.checkpoint.metadata import (
    TENSORS,
    TRAINING_STATE,
    Manifest,
    damaged_files,
    raise_damaged,
    surplus_files,
)
from deepspeed_autoep.checkpoint.planner import PieceLoadPlanner
from deepspeed_autoep.checkpoint.save import failures_of
from deepspeed_autoep.checkpoint.tensors import LogicalTensor, Piece
from deepspeed_autoep.errors import CheckpointError

logger = logging.getLogger("deepspeed_autoep")

Verification = Literal["full", "sizes"]
_SHOWN = 5


def verify_files(folder: Path, manifest: Manifest, verification: Verification, group: dist.ProcessGroup) -> None:
    """Every file of the checkpoint is there and as it was written; each is read by one rank. Collective over ``group``.

    Raises :class:`CheckpointError` on every rank, which names the files at fault.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    # Large ones first, so that ranks read about as much.
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))[rank::world]
    faults: list = [None] * world
    slices = [name for name in names if name.endswith(".distcp")]
    mine = damaged_files(folder, manifest.files, slices, checksums=verification == "full")
    # The index and Python objects in any case: they are unpickled.
    mine += damaged_files(folder, manifest.files, [name for name in names if name not in slices])
    if rank == 0:
        mine += surplus_files(folder, manifest.files)
    dist.all_gather_object(faults, mine, group=group)
    raise_damaged(folder, [fault for part in faults for fault in part])


def check_tensors(folder: Path, manifest: Manifest, tensors: Collection[LogicalTensor], strict: bool) -> list[LogicalTensor]:
    """Those of the model's ``tensors`` that the checkpoint holds. Local.

    Raises :class:`CheckpointError` that names tensors: of another shape; with ``strict``, missing in the checkpoint or in the model.
    """
    own = {tensor.name: tensor for tensor in tensors}
    for name, entry in manifest.tensors.items():
        if name in own and entry.shape != own[name].cut.shape:
            raise CheckpointError(
                f"checkpoint {folder} has {name!r} of shape {list(entry.shape)}, the model's is {list(own[name].cut.shape)}: is it of another configuration? "
                "deepspeed-autoep export and from_pretrained(..., ignore_mismatched_sizes=True) take what fits"
            )
    common = [tensor for tensor in tensors if tensor.name in manifest.tensors and manifest.tensors[tensor.name].stored]
    if own and not common:
        raise CheckpointError(
            f"checkpoint {folder} holds none of the model's {len(own)} tensors: it has {_first(manifest.tensors)!r} and others, the model "
            f"{_first(own)!r} and others. Is one of them inside of another module?"
        )
    missing = [name for name in own if name not in manifest.tensors]
    unexpected = [name for name in manifest.tensors if name not in own]
    for names, text in ((missing, "lacks {} tensors of the model"), (unexpected, "has {} tensors that the model has not")):
        if names:
            message = f"checkpoint {folder} {text.format(len(names))}: {', '.join(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
            if strict:
                raise CheckpointError(f"{message}. load_module_strict=False takes what both have")
            if dist.get_rank() == 0:
                logger.warning("%s", message)
    return common


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)


def read_pieces(folder: Path, pieces: Iterable[Piece], blob_keys: Iterable[str], group: dist.ProcessGroup) -> dict[str, bytes]:
    """Fill the views of ``pieces``, cast to their dtypes; returns the blobs. Collective over ``group``."""
    planner = PieceLoadPlanner(pieces, blob_keys)
    try:
        dcp.load({}, storage_reader=FileSystemReader(folder / TENSORS), planner=planner, process_group=group)
    except dcp.CheckpointException as error:  # not an Exception
        raise CheckpointError(
            f"checkpoint {folder} could not be read: {failures_of(error)}. The engine's weights and states are undefined until a load succeeds"
        ) from None
    return planner.blobs


def read_training_state(folder: Path) -> dict[str, Any]:
    """The client's state and the scheduler's: any Python objects, so only from files that are trusted."""
    return torch.load(io.BytesIO((folder / TRAINING_STATE).read_bytes()), map_location="cpu", weights_only=False)
