"""The command line of train.py."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

RANK = int(os.environ.get("RANK", "0"))


def fail(message: str) -> NoReturn:
    """End with a message, printed once: a launcher ends all ranks when one exits, and the others let rank 0 be first."""
    if RANK != 0:
        time.sleep(30)
    print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _positive(text: str) -> int:
    if _natural(text) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def parse_arguments(description: str) -> argparse.Namespace:
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    here = Path(__file__).parent
    add("--deepspeed_config", default=str(here / "ds_config.json"), help="DeepSpeed's JSON configuration")
    add("--local_rank", type=int, default=0, help="set by DeepSpeed's launcher")
    add(
        "--model",
        default="mixtral",
        help="a family (mixtral, qwen3_moe, ...), or a folder with a Hugging Face config.json; weights start random",
    )
    add("--data", help="a file, or a folder of text files; default: the Python standard library's sources")
    add("--steps", type=_positive, help="default: total_num_steps of the configuration's scheduler, else 300")
    add("--length", type=_positive, default=128, help="bytes a sample")
    add("--eval_every", type=_positive, default=50, help="steps between validations")
    add("--eval_windows", type=_positive, default=128, help="samples a validation")
    add("--compare_steps", type=_natural, default=10, help="first steps compared with one plain process; 0: none")
    add("--seed", type=_natural, default=0)
    add("--output", default="runs", help="folder of the runs")
    add("--name", help="this run's folder in it; default: the time")
    add("--checkpoints", help="folder to save the training state in, asynchronously; where it holds one, the run goes on from it, on any number of ranks")
    add("--checkpoint_every", type=_positive, default=100, help="steps between two checkpoints; the last step has one, too")
    add("--prompt", help="text that generation starts from; default: the first bytes of the validation part")
    add("--generate", type=_positive, default=96, help="bytes a generated text")
    arguments = parser.parse_args()
    if arguments.length < 2:
        fail("--length 1: a sample needs two bytes, one to predict the other")
    if arguments.prompt == "":
        fail("--prompt must not be empty")
    if arguments.name and (Path(arguments.output) / arguments.name).exists():
        fail(f"--name {arguments.name}: {Path(arguments.output) / arguments.name} exists")
    return arguments


def read_config(path: str) -> dict:
    """The configuration, checked for what the example itself needs; ``initialize`` checks the rest."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        fail(f"--deepspeed_config {path}: {error.strerror}")
    except ValueError as error:
        fail(f"--deepspeed_config {path} is not valid JSON: {error}")
    if not isinstance(config, dict) or not config.get("expert_parallel", {}).get("enabled"):
        fail(f"--deepspeed_config {path}: this example needs expert_parallel.enabled=true")
    if "type" not in config.get("optimizer", {}):
        fail(f"--deepspeed_config {path}: this example needs an optimizer block with a type")
    return config


def default_steps(config: dict) -> int:
    return config.get("scheduler", {}).get("params", {}).get("total_num_steps", 300)
