"""Write a model's whole tensors as a Hugging Face folder, which ``from_pretrained`` and other programs read.

Tensors are written as they come, each at its place in its file: held at a time is what is converted together, or one expert
of it. Everything is made below ``.export`` in the folder and moved out at the end, weights last and their index after them, so that
an export that is interrupted before that leaves the folder as it was; one that is interrupted while it moves files leaves the others below
``.export``.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from deepspeed_autoep.errors import ConfigError, ModelError
from deepspeed_autoep.storage import sync_folder, write_file
from deepspeed_autoep.weights.export_plan import ExportPlan, TensorSource, plan_export
from deepspeed_autoep.weights.safetensors_writer import SafetensorsWriter

_INDEX = "model.safetensors.index.json"
_STAGING = ".export"
# Of any program; save_pretrained's own, which an overwriting export replaces.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
_REPLACED = ("model.safetensors", "model-*-of-*.safetensors", _INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKENIZER = (
    "tokenizer*.json",
    "tokenizer*.model",
    "*.tiktoken",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "processor_config.json",
    "*preprocessor_config.json",
)


@dataclass(frozen=True)
class ExportReport:
    """What was written: ``weights`` are names of files in ``folder``."""

    folder: Path
    weights: tuple[str, ...]
    num_tensors: int
    num_bytes: int  # of tensors


def export_folder(
    out: str | Path,
    source: TensorSource,
    model: nn.Module,
    *,
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write what ``model.save_pretrained(out)`` would, with the tensors of ``source``: the same names, dtypes and bits.

    ``model``: a transformers model of the source's class, on any device and cut or not, for its class, configuration, generation
    configuration and the conversions that it was loaded with. Files hold at most ``max_shard_bytes`` of tensors each, a
    larger tensor alone. ``tokenizer``: a folder whose tokenizer and processor files are copied. Local; :func:`plan_export` says
    what other ranks have to read where reading is a collective.

    Raises :class:`ConfigError`: ``out`` is no folder, or holds weights or an interrupted export (without ``overwrite``), or weights
    that are not save_pretrained's; ``tokenizer`` is no folder with a tokenizer; ``max_shard_bytes`` is not positive.
    Raises :class:`ModelError` as :func:`plan_export` and :meth:`ExportPlan.read` do, and for a configuration that cannot be saved.
    """
    out = Path(out).expanduser()
    tokenizer_files = _tokenizer_files(tokenizer)
    _check_folder(out, overwrite)
    plan = plan_export(source, model, max_shard_bytes)

    staging = out / _STAGING
    if overwrite:
        shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write_configuration(staging, model, plan)
        for path, name in tokenizer_files:
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, staging / name)
        _write_weights(staging, source, plan)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _publish(staging, out, tuple(plan.files))
    shutil.rmtree(staging, ignore_errors=True)
    return ExportReport(out, tuple(plan.files), sum(map(len, plan.files.values())), plan.total_bytes)


def _tokenizer_files(folder: str | Path | None) -> list[tuple[Path, str]]:
    """(path, name in the new folder)"""
    if folder is None:
        return []
    root = Path(folder).expanduser()
    found = sorted({path for pattern in _TOKENIZER for path in root.glob(pattern) if path.is_file()})
    if not found:
        what = "a folder without tokenizer files" if root.is_dir() else "not a folder"
        raise ConfigError(f"tokenizer={str(folder)!r} is {what}: legal is one that a tokenizer's save_pretrained wrote, or None")
    return [(path, path.relative_to(root).as_posix()) for path in found]


def _check_folder(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={str(out)!r} is a file: legal is a folder, which need not exist")
    if (out / _STAGING).exists() and not overwrite:
        raise ConfigError(f"{out / _STAGING} exists: an export to out={str(out)!r} is under way or was interrupted. Wait, or overwrite it (overwrite=True, --overwrite)")
    if (out / "checkpoint.json").exists():
        raise ConfigError(f"out={str(out)!r} is a checkpoint, whose config.json would be replaced: take another folder")
    held, replaced = _matching(out, _WEIGHTS), _matching(out, _REPLACED)
    if held and not overwrite:
        raise ConfigError(f"out={str(out)!r} holds weights already, {held[0].name!r} among them: take another folder, or overwrite them (overwrite=True, --overwrite)")
    foreign = [path.name for path in held if path not in replaced]
    if foreign:
        raise ConfigError(
            f"out={str(out)!r} holds {foreign[0]!r}, which save_pretrained does not write and some programs would read as the model's: move "
            "it away, or take another folder"
        )


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def _write_configuration(folder: Path, model: nn.Module, plan: ExportPlan) -> None:
    from transformers.dynamic_module_utils import custom_object_save

    config = copy.deepcopy(model.config)
    config.dtype = str(plan.model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    try:
        if model.is_remote_code():
            custom_object_save(model, folder, config=config)
        config.save_pretrained(folder)
        if model.can_generate() and getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
    except ValueError as error:
        raise ModelError(f"the configuration of {type(model).__name__} cannot be saved: {error}") from error


def _write_weights(folder: Path, source: TensorSource, plan: ExportPlan) -> None:
    file_of = {tensor.name: name for name, tensors in plan.files.items() for tensor in tensors}
    writers: dict[str, SafetensorsWriter] = {}
    try:
        for group, expert in plan.steps():
            for tensor, row, value in group.convert(plan.read(source, group, expert), plan.model, expert):
                name = file_of[tensor.name]
                if name not in writers:
                    writers[name] = SafetensorsWriter(folder / name, plan.files[name])
                writers[name].write(tensor, value, row)
                if writers[name].complete:
                    writers[name].close()
        for writer in writers.values():
            writer.close()
    finally:
        for writer in writers.values():
            writer.abandon()
    if len(plan.files) > 1:
        index = {
            "metadata": {"total_parameters": plan.model.num_parameters(), "total_size": plan.total_bytes},
            "weight_map": file_of,
        }
        write_file(folder / _INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def _publish(staging: Path, out: Path, weights: tuple[str, ...]) -> None:
    """Move all files out, so that the folder is not complete before the last one is there."""
    # The index first: without it the parts that it lists are no model.
    for path in sorted(_matching(out, _REPLACED), key=lambda path: not path.name.endswith(".index.json")):
        path.unlink()
    last = [*weights, _INDEX]
    names = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    names.sort(key=lambda name: last.index(name) if name in last else -1)
    for name in names:
        if name == names[-1]:
            sync_folder(out)
        (out / name).parent.mkdir(exist_ok=True)
        os.replace(staging / name, out / name)
    sync_folder(out)
