"""Which kind of stock checkpoint a folder holds, from the names of its files."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

from deepspeed_autoep.compat import stock_keys

UNIVERSAL_FOLDER = "zero"
MODEL_FILE = re.compile(rf"{stock_keys.MODEL_FILE_PREFIX}(\d+){re.escape(stock_keys.MODEL_FILE_SUFFIX)}")
ZERO3_MODEL_FILE = re.compile(
    rf"{stock_keys.ZERO_FILE_PREFIX}(\d+)_{stock_keys.MODEL_FILE_PREFIX}(\d+){re.escape(stock_keys.MODEL_FILE_SUFFIX)}"
)
ZERO_FILE = re.compile(
    rf"(?:bf16_|fp16_)?{stock_keys.ZERO_FILE_PREFIX}(\d+)_{stock_keys.MODEL_FILE_PREFIX}(\d+){re.escape(stock_keys.OPTIM_FILE_SUFFIX)}"
)
EXPERT_FILE = re.compile(rf"layer_(\d+)_expert_(\d+)_{stock_keys.MODEL_FILE_PREFIX}(\d+){re.escape(stock_keys.MODEL_FILE_SUFFIX)}")
PIPELINE_FILE = re.compile(r"layer_\d+-model_.*")


class StockKind(Enum):
    """What wrote a folder."""

    UNIVERSAL = "universal"  # deepspeed.checkpoint.ds_to_universal
    AUTOEP = "autoep"  # save_checkpoint, with files of single experts
    SHARDED = "sharded"  # save_checkpoint, without


def detect(folder: Path) -> StockKind | None:
    """The kind of stock checkpoint in the tag folder ``folder`` (``save_dir / tag``), by file names only; None for anything else."""
    folder = Path(folder)
    if not folder.is_dir():
        return None
    names = [path.name for path in folder.iterdir()]
    model = any(MODEL_FILE.fullmatch(name) or ZERO3_MODEL_FILE.fullmatch(name) for name in names)
    if (folder / UNIVERSAL_FOLDER).is_dir() and (model or (folder / UNIVERSAL_FOLDER / "optimizer_state.pt").exists()):
        return StockKind.UNIVERSAL
    if any(EXPERT_FILE.fullmatch(name) for name in names):
        return StockKind.AUTOEP
    return StockKind.SHARDED if model or any(ZERO_FILE.fullmatch(name) for name in names) else None


def numbered(folder: Path, pattern: re.Pattern) -> dict[tuple[int, ...], Path]:
    """The files of ``folder`` whose names match ``pattern``, by the numbers in them, in order."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            found.setdefault(tuple(int(number) for number in match.groups()), path)
    return dict(sorted(found.items()))


def conversion(folder: Path) -> str:
    """How a folder that is not read becomes one that is."""
    return f"Convert it: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder {folder}_universal"
