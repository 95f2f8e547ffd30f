"""The structure of a quantized model beside its checkpoint's tensors: ``quantization.pt``, Model-Optimizer's own ``modelopt_state``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed_autoep.checkpoint import folders
from deepspeed_autoep.checkpoint.metadata import Manifest, damaged_files, raise_damaged, read_manifest

QUANTIZATION = "quantization.pt"


def saved_structure(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """{} for a model that was not quantized. Raises :class:`CheckpointError` for a damaged file. It holds Python objects, as
    ``training_state.pt`` does."""
    if QUANTIZATION not in manifest.files:
        return {}
    raise_damaged(folder, damaged_files(folder, manifest.files, [QUANTIZATION]))
    return torch.load(folder / QUANTIZATION, map_location="cpu", weights_only=False)


def checkpoint_structure(load_dir: str | Path, tag: str | None = None) -> dict[str, Any]:
    """The structure of the checkpoint ``load_dir/tag`` (or what ``latest`` names), for
    :func:`deepspeed_autoep.quantization.restore_structure`, which gives it to a plain model before ``initialize``.

    Raises :class:`CheckpointError`: no such checkpoint, or a damaged one.
    """
    load_dir = Path(load_dir)
    folder = folders.find_or_latest(load_dir, tag) or load_dir
    return saved_structure(folder, read_manifest(folder))
