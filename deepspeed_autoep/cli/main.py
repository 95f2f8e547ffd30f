"""The command ``deepspeed-autoep``: look at checkpoints, and export them for Hugging Face."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from deepspeed_autoep.errors import AutoEPError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 with a message that names what is wrong."""
    options = _parser().parse_args(arguments)
    # DeepSpeed, which the package imports, looks for an accelerator; files need none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed_autoep.cli.export import export
    from deepspeed_autoep.cli.inspect import inspect

    try:
        {"inspect": inspect, "export": export}[options.command](options)
    except (AutoEPError, OSError) as error:
        print(f"deepspeed-autoep {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepspeed-autoep", description="Checkpoints of deepspeed_autoep engines.")
    commands = parser.add_subparsers(dest="command", required=True)

    inspecting = commands.add_parser("inspect", help="list tensors, shapes, slices, topology, step and sizes, and verify")
    _add_checkpoint(inspecting)
    inspecting.add_argument("--match", metavar="TEXT", default="", help="only tensors whose name contains TEXT")
    inspecting.add_argument("--slices", action="store_true", help="also where each slice of a tensor lies")
    inspecting.add_argument("--json", action="store_true", help="print the same as one JSON object")

    exporting = commands.add_parser("export", help="write safetensors files that from_pretrained loads")
    _add_checkpoint(exporting)
    exporting.add_argument("out", metavar="OUT", help="folder to write to")
    exporting.add_argument("--dtype", choices=("model", "bf16", "fp16", "fp32"), default="model", help="of parameters; model: as they were trained")
    exporting.add_argument("--max-shard-size", metavar="SIZE", type=parse_size, default="5GB", help="of a file, such as 500MB or 5GB; 5GB by default")
    exporting.add_argument("--tokenizer", metavar="FOLDER", help="folder whose tokenizer files are copied")
    exporting.add_argument("--overwrite", action="store_true", help="replace weights that OUT holds")
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint's folder, or a save folder, of which 'latest' is taken")
    parser.add_argument("--tag", help="which checkpoint of a save folder")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not read all files for their checksums")


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """``5GB`` -> 5,000,000,000 bytes. Raises ``argparse.ArgumentTypeError``."""
    number = text.rstrip("iIbBkKmMgG")
    unit = text[len(number) :].upper()
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r}: legal are a number and one of {', '.join(u for u in _UNITS if u)}") from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: legal are sizes above 0")
    return size


def show_size(size: int) -> str:
    for unit in ("GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f} {unit}"
    return f"{size} B"
