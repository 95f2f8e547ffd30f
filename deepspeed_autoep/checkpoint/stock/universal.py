"""Universal checkpoints: ``zero/<parameter>/{fp32,<state>,step}.pt``, each tensor whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_autoep.checkpoint.stock.files import StockFiles, pick
from deepspeed_autoep.checkpoint.stock.kinds import UNIVERSAL_FOLDER
from deepspeed_autoep.checkpoint.stock.model_files import ModelFiles
from deepspeed_autoep.checkpoint.stock.names import ExpertLayer
from deepspeed_autoep.checkpoint.stock.sources import Source, Stored
from deepspeed_autoep.checkpoint.stock.table import MASTER, StockTensor, number
from deepspeed_autoep.compat import stock_keys
from deepspeed_autoep.errors import CheckpointError

_STEP = "step"


def universal_tensors(files: StockFiles, model: ModelFiles) -> Iterator[StockTensor]:
    """The parameters that the optimizer trains, under stock's names. Every file is opened.

    Raises :class:`CheckpointError` for a parameter without a folder, a file that is missing or damaged, or of a wrong shape.
    """
    zero = files.folder / UNIVERSAL_FOLDER
    if model.param_shapes is None:
        raise CheckpointError(f"{model.paths[0]} lacks {stock_keys.PARAM_SHAPES!r}: which parameters were trained is not known")
    stacks = {name: layer for layer in model.layers for name in layer.stacks()}
    stage3_steps = _stage3_steps(files, model) if model.is_stage3 else {}
    common: tuple[str, set[str]] | None = None
    for name, shape in model.trained_shapes.items():
        folder = zero / name
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is missing: {model.paths[0].name} says that {name!r} was trained. Was the conversion interrupted?")
        states = {path.stem for path in folder.glob("*.pt")} - {_STEP}
        if common is None:
            common = name, states | {stock_keys.FP32_WEIGHT_KEY}
        for state in sorted(common[1] ^ states):
            missing, having = (folder, common[0]) if state in common[1] else (zero / common[0], name)
            raise CheckpointError(f"{missing / f'{state}.pt'} is missing, {having!r} has one")
        expected = _expected_shape(model, stacks.get(name), shape)
        sources = {state: _source(files, folder / f"{state}.pt", expected) for state in sorted(states)}
        for state, source in sources.items():
            if source.shape != sources[stock_keys.FP32_WEIGHT_KEY].shape:
                raise CheckpointError(
                    f"{folder / f'{state}.pt'} has the shape {list(source.shape)}, its fp32.pt {list(sources[stock_keys.FP32_WEIGHT_KEY].shape)}"
                )
        _check_parts(model, name, sources[stock_keys.FP32_WEIGHT_KEY].shape, folder, is_expert=name in stacks)
        step = folder / f"{_STEP}.pt"
        renamed = {MASTER if state == stock_keys.FP32_WEIGHT_KEY else state: source for state, source in sources.items()}
        yield StockTensor(name, renamed, trained=True, step=number(files.load(step), step) if step.is_file() else stage3_steps.get(name))


def _stage3_steps(files: StockFiles, model: ModelFiles) -> dict[str, float]:
    """The converter leaves ZeRO-3's step counts where they were: with the states of rank 0, by group of names."""
    path, content = universal_optimizer(files)
    states = pick(content, (stock_keys.OPTIMIZER_STATE_DICT, "state"), path)
    found = {}
    for index, group in enumerate(model.param_shapes or ()):
        step = pick(states, (index,), path).get(_STEP)
        if step is not None:
            found |= dict.fromkeys(group, number(step, path))
    return found


def _expected_shape(model: ModelFiles, layer: ExpertLayer | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """From the ``shape`` of a rank's part; None where TP cut it."""
    if layer is not None:
        return layer.num_experts, *shape[1:]
    return shape if model.tp_size == 1 else None


def _source(files: StockFiles, path: Path, shape: tuple[int, ...] | None) -> Source:
    """ZeRO-3's tensors without TP stand alone and flat, all others under a key in their own shape."""
    keys = (stock_keys.PARAM,) if isinstance(files.load(path), dict) else ()
    return Stored.of(files, path, keys, shape)


def _check_parts(model: ModelFiles, name: str, shape: tuple[int, ...], folder: Path, is_expert: bool) -> None:
    """A TP-cut parameter has the shape that AutoTP's note on it says."""
    if model.tp_size == 1 or is_expert or model.is_stage3:
        return
    weight = model.weight(name)
    if weight is not None and weight.shape != shape:
        raise CheckpointError(f"{folder / 'fp32.pt'} has the shape {list(shape)}, {model.paths[0].name} says {list(weight.shape)}")


def universal_optimizer(files: StockFiles) -> tuple[Path, dict[str, Any]]:
    """``zero/optimizer_state.pt``, what the optimizer holds beside tensors: (its path, its content)."""
    path = files.folder / UNIVERSAL_FOLDER / "optimizer_state.pt"
    content = files.load_dict(path)
    pick(content, (stock_keys.PARAM_GROUPS,), path)
    return path, content
