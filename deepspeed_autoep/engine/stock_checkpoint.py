"""A stock DeepSpeed checkpoint as the engine takes one of its own: the same entries, the same checks, the same views to fill."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_autoep.checkpoint.metadata import (
    GroupEntry,
    Manifest,
    OptimizerEntry,
    TensorEntry,
    Topology,
    dtype_name,
    encode,
)
from deepspeed_autoep.checkpoint.stock.reader import StockReader, open_stock
from deepspeed_autoep.checkpoint.stock.table import MASTER
from deepspeed_autoep.checkpoint.stock.table import WEIGHT as STOCK_WEIGHT
from deepspeed_autoep.checkpoint.tensors import WEIGHT, LogicalTensor, pieces_to_read
from deepspeed_autoep.engine.master_state import STEP, MasterState
from deepspeed_autoep.errors import CheckpointError
from deepspeed_autoep.gradients.slices import ParameterInfo

logger = logging.getLogger("deepspeed_autoep")

# States of the optimizers that both know; a step count of DeepSpeed's own is a number, of torch's a tensor.
_ADAM = ("exp_avg", "exp_avg_sq")
_STATES = {"Adam": _ADAM, "AdamW": _ADAM, "FusedAdam": _ADAM, "DeepSpeedCPUAdam": _ADAM, "SGD": ("momentum_buffer",)}
_COUNTS_IN_NUMBERS = ("FusedAdam", "DeepSpeedCPUAdam")
_NOT_STATES = (MASTER, STOCK_WEIGHT)


@dataclass(frozen=True)
class StockCheckpoint:
    """``manifest``: as if this package had saved it; ``state``: client state and scheduler, by the user's groups."""

    reader: StockReader
    manifest: Manifest
    scheduler_origins: list[int] | None  # of stock's groups, for lists that the scheduler keeps by group


def open_stock_checkpoint(
    folder: Path, tensors: Iterable[LogicalTensor], masters: MasterState, families: dict[torch.Tensor, ParameterInfo], groups: int
) -> StockCheckpoint:
    """Opens and checks every file; no tensor is read. Local. Raises :class:`CheckpointError` as :func:`open_stock` does."""
    tensors = list(tensors)
    names = {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}
    reader = open_stock(folder, like={name: tensor.cut.shape for name, tensor in names.items()})
    entries = {_own_name(name, names): _entry(reader.shape(name), reader.states(name).get(STOCK_WEIGHT), name, "parameter") for name in reader.names()}
    buffers = {name: _entry(shape, dtype, name, "buffer") for name, (shape, dtype) in reader.buffers().items()}
    optimizer, origins = _optimizer(reader, names, masters, families, groups)
    manifest = Manifest(
        created="",
        libraries={},
        model="",
        topology=Topology(world_size=reader.dp_size * reader.tp_size, tp=reader.tp_size, ep=reader.ep_size, etp=1, zero_stage=0),
        counters={
            "global_steps": reader.global_steps,
            "global_samples": reader.global_samples,
            "skipped_steps": reader.skipped_steps,
            "pending_passes": 0,
        },
        tensors=entries | buffers,
        optimizer=optimizer,
        loss_scale=None if reader.loss_scale is None else {key: value for key, value in reader.loss_scale.items() if isinstance(value, int | float)},
        random_states=False,
    )
    return StockCheckpoint(reader, manifest, origins)


def _own_name(name: str, names: dict[str, LogicalTensor]) -> str:
    """Of a tied parameter each side may know another name first."""
    return names[name].name if name in names else name


def _entry(shape: tuple[int, ...], dtype: torch.dtype | None, name: str, kind) -> TensorEntry:
    stored = dtype_name(dtype or torch.float32)
    return TensorEntry(shape=tuple(shape), dtype=stored, model_dtype=stored, kind=kind, trained=kind == "parameter")


def _optimizer(
    reader: StockReader, names: dict[str, LogicalTensor], masters: MasterState, families: dict[torch.Tensor, ParameterInfo], groups: int
) -> tuple[OptimizerEntry | None, list[int] | None]:
    """With the engine's own groups and the options that stock's have; None where the files have no states that can be read."""
    if reader.states_missing is not None or reader.trained is None or masters.base is None:
        return None, None
    kind = type(masters.base).__name__
    trained = {_own_name(name, names): name for name in reader.trained}
    states = {own: tuple(state for state in reader.states(name) if state not in _NOT_STATES) for own, name in trained.items()}
    for own, found in states.items():
        if found and sorted(found) != sorted(_STATES.get(kind, ())):
            raise CheckpointError(
                f"checkpoint {reader.folder} has the optimizer states {sorted(found)} of {own!r}, and the engine's optimizer is {kind}: "
                "load_optimizer_states=False loads the weights only"
            )
    origin_of = {info.name: info.group for info in families.values()}
    options, origins = _options(reader, names, origin_of, groups)
    if not all(options) and dist.get_rank() == 0:
        logger.warning("checkpoint %s does not say which options (lr, ...) its optimizer's groups had: the engine's stay as they are", reader.folder)
    count = (lambda step: int(step)) if kind in _COUNTS_IN_NUMBERS else (lambda step: torch.tensor(float(step)))
    keeps_steps = "momentum_buffer" not in _STATES.get(kind, ())
    steps = {_own_name(name, names): step for name, step in reader.step_counts.items()}
    return (
        OptimizerEntry(
            type=kind,
            groups=tuple(
                GroupEntry(parameters=tuple(name for name in trained if origin_of.get(name) == origin), options=options[origin]) for origin in range(groups)
            ),
            states={own: {state: dtype_name(reader.states(trained[own])[state]) for state in found} for own, found in states.items()},
            values={
                own: {STEP: encode(count(steps[own]), STEP)} if found and keeps_steps and own in steps else {} for own, found in states.items()
            },
        ),
        origins,
    )


def _options(reader: StockReader, names: dict[str, LogicalTensor], origin_of: dict[str, int], groups: int) -> tuple[list[dict[str, Any]], list[int] | None]:
    """Of each of the user's groups: those of stock's groups that hold its parameters, which must agree; and whose each of these is."""
    options: list[dict[str, Any]] = [{} for _ in range(groups)]
    origins: list[int] = []
    for number, group in enumerate(reader.groups):
        own = {origin_of[_own_name(name, names)] for name in group.names or () if _own_name(name, names) in origin_of}
        encoded = {key: encode(value, key) for key, value in group.options.items() if key != STEP}
        for origin in own:
            if options[origin] not in ({}, encoded):
                raise CheckpointError(
                    f"checkpoint {reader.folder}: group {number} of its optimizer has other options than another one, and the engine has the parameters of "
                    f"both in its group {origin}: load_optimizer_states=False loads the weights only"
                )
            options[origin] = encoded
        origins += sorted(own)[:1]
    return options, origins if len(origins) == len(reader.groups) else None


def read_stock(checkpoint: StockCheckpoint, tensors: Iterable[LogicalTensor]) -> None:
    """Fill what this rank holds of ``tensors``, each rank by itself."""
    reader = checkpoint.reader
    tensors = list(tensors)
    buffers = reader.buffers()
    stored = set(reader.names())
    for tensor in tensors:
        name = next((name for name in (tensor.name, *tensor.aliases) if name in stored), tensor.name)
        for state in tensor.dtypes:
            for piece in pieces_to_read([tensor.only(state)]):
                if name in buffers:
                    value = reader.read_buffer(name, piece.box)
                else:
                    held = reader.states(name)
                    value = reader.read(name, (MASTER if MASTER in held else STOCK_WEIGHT) if state == WEIGHT else state, piece.box)
                if prod(value.shape) != piece.view.numel():
                    raise CheckpointError(f"{reader.folder}: {name!r} gave {list(value.shape)} for {list(piece.view.shape)}")
                piece.view.copy_(value)
