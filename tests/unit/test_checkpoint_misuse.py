"""Calls and files that a save, a load or an export cannot take: one error, of one class, on every rank, that names them."""

import json
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_autoep.checkpoint import folders
from deepspeed_autoep.cli.main import main
from deepspeed_autoep.errors import CheckpointError
from tests.unit.models import make_model
from tests.unit.pool import run_on
from tests.unit.runs import run_steps, train_and_save
from tests.unit.test_checkpoint_options import SMALL, TAG, bits, copied
from tests.unit.training import build_engine, ds_config, engine_of


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    run_on(2, train_and_save, SMALL, str(folder))
    return folder


def outcome(call) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Wrapped(nn.Module):
    """As value heads are put on a model."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = make_model("mixtral", seed=5)
        self.config = self.lm.config

    def forward(self, **inputs):
        return self.lm(**inputs)


def loads_into_another_module(folder: str) -> tuple[str, bool]:
    with engine_of(replace(SMALL, ep=2), Wrapped()) as engine:
        before = bits(engine)
        message = outcome(lambda: engine.load_checkpoint(folder, load_module_strict=False, load_module_only=True))
        return message, bits(engine) == before


def test_a_checkpoint_without_any_tensor_of_the_model(good):
    """Where what both have is taken, and they have nothing: a run would go on from random weights."""
    for message, unchanged in run_on(2, loads_into_another_module, str(good)):
        assert message.startswith("CheckpointError") and "none of the model's" in message, message
        assert "'lm.model.embed_tokens.weight'" in message and "'model.embed_tokens.weight'" in message
        assert unchanged


@pytest.mark.parametrize("tag", [" a", "a ", "a\n", " ", "", "\udc80a", "a/b", ".a", "latest", "a\0"])
def test_tags_that_latest_could_not_name(tag):
    with pytest.raises(CheckpointError, match="legal are"):
        folders.check_tag(tag)


@pytest.mark.parametrize("tag", ["épreuve nr. 3 [x]*%", "step=3", "a b", "a."])
def test_tags_that_are_names(tag, tmp_path):
    folders.write_latest(tmp_path, tag)
    assert folders.latest_tag(tmp_path) == tag


# Arguments that ranks do not share


def differing_calls(folder: str) -> list[tuple[str, str]]:
    first = dist.get_rank() == 0
    with engine_of(SMALL) as engine:
        calls = [
            ("asynchronous", lambda: engine.save_checkpoint(folder, asynchronous=first)),
            ("save_latest", lambda: engine.save_checkpoint(folder, save_latest=first)),
            ("exclude_frozen_parameters", lambda: engine.save_checkpoint(folder, exclude_frozen_parameters=first)),
            ("save_dir", lambda: engine.save_checkpoint(folder if first else None)),
            ("load_optimizer_states", lambda: engine.load_checkpoint(folder, load_optimizer_states=first)),
            ("load_module_only", lambda: engine.load_checkpoint(folder, load_module_only=first)),
            ("load_module_strict", lambda: engine.load_checkpoint(folder, load_module_strict=first)),
            ("custom_load_fn", lambda: engine.load_checkpoint(folder, custom_load_fn=None if first else print)),
            ("load_dir", lambda: engine.load_checkpoint(folder if first else "")),
            ("exclude_frozen_parameters", lambda: engine.save_16bit_model(folder, exclude_frozen_parameters=first)),
            ("save_filename", lambda: engine.save_16bit_model(folder, "a.bin" if first else "pytorch_model.bin")),
            ("overwrite", lambda: engine.save_16bit_model(folder, overwrite=first)),
        ]
        return [(name, outcome(call)) for name, call in calls]


def test_arguments_that_differ_are_the_same_error_everywhere(tmp_path):
    results = run_on(2, differing_calls, str(tmp_path), timeout=60)
    assert results[0] == results[1]
    for name, message in results[0]:
        assert message.startswith("RankMismatchError") and f"({name}=...)" in message, message
    assert list(tmp_path.iterdir()) == []


def fails_on_rank_0(folder: str) -> list[str]:
    first = dist.get_rank() == 0
    with engine_of(SMALL) as engine:
        file = Path(folder) / "file"
        if first:
            file.write_text("")
        dist.barrier()
        return [
            outcome(call)
            for call in (
                lambda: engine.save_checkpoint(folder, client_state=[1] if first else None),
                lambda: engine.save_checkpoint(folder, client_state={"a": lambda: 0} if first else None),
                lambda: engine.save_checkpoint(file),
                lambda: engine.save_16bit_model(file),
                lambda: engine.save_16bit_model(folder, max_shard_bytes=0),
                lambda: engine.save_16bit_model(folder, tokenizer=f"{folder}/nothing"),
            )
        ]


def test_errors_are_of_one_class_on_all_ranks(tmp_path):
    """``except CheckpointError`` must not part the ranks."""
    first, second = run_on(2, fails_on_rank_0, str(tmp_path), timeout=60)
    assert [message.partition(":")[0] for message in first] == [message.partition(":")[0] for message in second]
    assert all(message.startswith("CheckpointError") for message in first[:3]), first
    assert not any(message.startswith("returned") for message in first), first


# The file latest


LATEST_DAMAGES = {
    "bytes": lambda path: path.write_bytes(b"\xff\xfe"),
    "empty": lambda path: path.write_bytes(b"\n"),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


def loads(folder: str) -> str:
    with engine_of(SMALL) as engine:
        return outcome(lambda: engine.load_checkpoint(folder))


@pytest.mark.parametrize("how", LATEST_DAMAGES)
def test_a_damaged_latest_is_named(how, good, tmp_path, capsys):
    folder = copied(good, tmp_path)
    LATEST_DAMAGES[how](folder / "latest")
    for message in run_on(2, loads, str(folder)):
        assert message.startswith("CheckpointError") and f"{folder / 'latest'} is damaged" in message, message
    assert main(["inspect", str(folder)]) == 1 and str(folder / "latest") in capsys.readouterr().err


def test_a_checkpoints_own_folder_may_have_any_name(good, tmp_path):
    for name in ("latest", ".old"):
        (copied(good, tmp_path / name) / TAG).rename(tmp_path / name / name)
        assert all(message.startswith("returned") for message in run_on(2, loads, str(tmp_path / name / name)))


def test_a_manifest_that_is_no_text_is_named_in_a_line(good, tmp_path):
    folder = copied(good, tmp_path)
    path = folder / TAG / "checkpoint.json"
    content = path.read_bytes()
    path.write_bytes(content[:99] + b"\xff" + content[100:])
    for message in run_on(2, loads, str(folder)):
        assert "checkpoint.json" in message and len(message) < 400


def test_two_saves_to_one_folder_do_not_take_each_others_latest(tmp_path):
    failures = []

    def write(tag: str) -> None:
        try:
            for _ in range(300):
                folders.write_latest(tmp_path, tag)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(tag,)) for tag in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and folders.latest_tag(tmp_path) in ("a", "b")


# What cannot be written


class Bare:
    """A scheduler without a state."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    def step(self, *_) -> None:
        pass

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def saves_unwritable(folder: str) -> list[str]:
    import deepspeed_autoep

    messages = []
    with engine_of(SMALL) as engine:
        engine.module.config.extra = torch.zeros(2)
        messages.append(outcome(lambda: engine.save_checkpoint(folder)))
    for kind in (Bare, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)):
        model = make_model("mixtral")
        engine, *_ = deepspeed_autoep.initialize(
            model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), lr_scheduler=kind, config=ds_config(SMALL)
        )
        if kind is not Bare:
            engine.lr_scheduler.extra = lambda: 0  # what it keeps in its state
        messages.append(outcome(lambda engine=engine: engine.save_checkpoint(folder)))
        engine.destroy()
    return messages


def test_what_cannot_be_written_is_named(tmp_path):
    for config, bare, scheduler in run_on(2, saves_unwritable, str(tmp_path)):
        assert config.startswith("CheckpointError") and "model.config.extra is a " in config, config
        assert bare.startswith("CheckpointError") and "Bare" in bare and "state_dict" in bare, bare
        assert scheduler.startswith("CheckpointError") and "lr_scheduler's 'extra'" in scheduler, scheduler
    assert list(tmp_path.iterdir()) == []


def saves_with_infinity(folder: str) -> None:
    model = make_model("mixtral")
    model.config.time_step_limit = (0.0, math.inf)
    engine = build_engine(SMALL, model)
    run_steps(engine, SMALL, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()


def test_a_configuration_without_an_end_is_exported(tmp_path):
    """Granite and Nemotron hybrids have one. JSON has no infinity: transformers writes an object for it."""
    run_on(2, saves_with_infinity, str(tmp_path / "saved"))
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    import transformers

    config = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert tuple(config.time_step_limit) == (0.0, math.inf)


def test_a_configuration_that_transformers_does_not_take_is_named(good, tmp_path, capsys):
    folder = copied(good, tmp_path)
    path = folder / TAG / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"hidden_size": "wide"}))
    assert main(["export", str(folder), str(tmp_path / "out"), "--no-verify"]) == 1
    assert "config.json" in capsys.readouterr().err
