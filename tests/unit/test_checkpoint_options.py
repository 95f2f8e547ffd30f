"""What else is in a checkpoint, and what is refused before anything is changed."""

import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.checkpoint.metadata import read_manifest
from deepspeed_autoep.errors import CheckpointError
from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.runs import SAVED_AFTER, STEPS, run_steps, train_and_save
from tests.unit.training import Case, build_engine, ds_config, mean_over_data, my_share, reference_of, relative

CASE = Case("mixtral", 4, 2, 2, 1, steps=STEPS, samples=8)
SMALL = replace(CASE, world=2, tp=1, ep=2, zero=2)
TAG = f"global_step{SAVED_AFTER}"


def bits(engine) -> list[int]:
    """Checksums of everything that a load may change on this rank."""
    from deepspeed_autoep.engine.logical_tensors import logical_tensors
    from deepspeed_autoep.engine.master_state import master_state
    from deepspeed_autoep.moe.lane_check import checksum

    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    tensors += [held.value for tensor in logical_tensors(engine, master_state(engine.optimizer)) for held in tensor.held.values()]
    return [checksum([tensor.detach()]).tolist() for tensor in tensors] + [
        engine.global_steps,
        engine.lr_scheduler.get_last_lr() if engine.lr_scheduler else None,
        checksum([torch.get_rng_state()]).tolist(),
        repr([{k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups]),
    ]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    run_on(2, train_and_save, SMALL, str(folder))
    return folder


def copied(good: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(good, tmp_path / "copy")
    return tmp_path / "copy"


# Integrity


def refused_load(case: Case, folder: str, options: dict | None = None, overrides: tuple = ()) -> tuple[str, bool]:
    """The message, and whether the engine is as it was."""
    engine = build_engine(case, make_model(case.family, seed=5, **dict(overrides)))
    run_steps(engine, case, 0, 1)
    before, message = bits(engine), "loaded"
    try:
        engine.load_checkpoint(folder, **(options or {}))
    except CheckpointError as error:
        message = str(error)
    except Exception as error:  # on ranks that found nothing wrong themselves
        message = f"{type(error).__name__}: {error}"
    after = bits(engine)
    engine.destroy()
    return message, before == after


FILES = ["checkpoint.json", "training_state.pt", "config.json", "tensors/.metadata", "tensors/__0_0_0.distcp", "tensors/__1_0_0.distcp"]
DAMAGES = ["flipped", "truncated", "missing"]


def damage(path: Path, how: str, seed: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    place = random.Random(seed).randrange(len(content))
    if how == "flipped":
        content[place] ^= 1 << random.Random(seed).randrange(8)
    else:
        del content[place:]
    path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_nothing_changes(name, how, good, tmp_path):
    folder = copied(good, tmp_path)
    damage(folder / TAG / name, how, f"{name}{how}")
    for message, unchanged in run_on(2, refused_load, SMALL, str(folder)):
        assert name in message and message != "loaded", message
        assert unchanged


def test_sizes_only_finds_what_has_another_size(good, tmp_path):
    folder = copied(good, tmp_path)
    case = replace(SMALL, expert_config=(("verify_checkpoint", "sizes"),))
    damage(folder / TAG / "tensors/__1_0_0.distcp", "truncated", "x")
    assert all("bytes" in message and unchanged for message, unchanged in run_on(2, refused_load, case, str(folder)))


def test_every_byte_of_the_manifest_counts(good):
    """A flip that leaves valid JSON is found by the manifest's own checksum."""
    content = (good / TAG / "checkpoint.json").read_bytes()
    digit = content.index(b'"global_steps": ') + len(b'"global_steps": ')
    changed = content[:digit] + b"3" + content[digit + 1 :]
    assert json.loads(changed)
    path = good / TAG / "checkpoint.json"
    try:
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="CRC-32"):
            read_manifest(good / TAG)
    finally:
        path.write_bytes(content)


def test_another_version_is_refused(good):
    from deepspeed_autoep.checkpoint import metadata

    manifest = read_manifest(good / TAG)
    path = good / TAG / "checkpoint.json"
    content = path.read_bytes()
    try:
        path.write_bytes(metadata.manifest_bytes(manifest.model_copy(update={"version": 99})))
        with pytest.raises(CheckpointError, match="version 99.*legal is 1"):
            read_manifest(good / TAG)
    finally:
        path.write_bytes(content)


OTHER_MODELS = {
    "another size": ((("intermediate_size", 64),), {}, ["gate_up_proj", "[8, 96, 32]", "[8, 128, 32]"]),
    "another depth": ((("num_hidden_layers", 3),), {}, ["lacks", "model.layers.2", "load_module_strict"]),
    "less depth": ((("num_hidden_layers", 1),), {"load_optimizer_states": False}, ["the model has not", "model.layers.1"]),
    "no such tag": ((), {"tag": "global_step9"}, ["global_step9", "does not exist", TAG]),
    "a wrong tag": ((), {"tag": "../x"}, ["'../x'", "legal"]),
}


@pytest.mark.parametrize("what", OTHER_MODELS)
def test_what_does_not_fit_is_named_and_nothing_changes(what, good):
    overrides, options, words = OTHER_MODELS[what]
    for message, unchanged in run_on(2, refused_load, SMALL, str(good), options, overrides):
        assert all(word in message for word in words), message
        assert unchanged


def test_another_optimizer_is_refused(good):
    for message, unchanged in run_on(2, refused_load, replace(SMALL, optimizer="SGD"), str(good)):
        assert "'AdamW'" in message and "'SGD'" in message and "load_optimizer_states=False" in message and unchanged


def loads_with(case: Case, folder: str, options: dict, overrides: tuple = ()):
    engine = build_engine(case, make_model(case.family, seed=5, **dict(overrides)))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("deepspeed_autoep")
    logger.addHandler(handler)
    try:
        result = engine.load_checkpoint(folder, **options)
    finally:
        logger.removeHandler(handler)
    weight = engine.module.model.norm.weight.detach().clone()
    states = len(engine.basic_optimizer.state)
    steps = engine.global_steps
    engine.destroy()
    return result, records, weight, states, steps


def test_a_partial_model_loads_when_it_is_asked_for(good):
    options = {"load_module_strict": False, "load_optimizer_states": False}
    result, records, weight, _, steps = run_on(2, loads_with, SMALL, str(good), options, (("num_hidden_layers", 3),))[0]
    assert result[0].endswith(TAG) and steps == SAVED_AFTER
    assert any("lacks" in record for record in records)
    assert not torch.equal(weight, torch.ones_like(weight))


def test_module_only(good):
    result, _, weight, states, steps = run_on(2, loads_with, SMALL, str(good), {"load_module_only": True})[0]
    assert result[0].endswith(TAG) and result[1] == {"seen": 7}
    assert steps == 0 and states == 0
    assert not torch.equal(weight, torch.ones_like(weight))


def evaluates(case: Case, folder: str) -> list[float]:
    """An engine without an optimizer takes the weights, and what it saves trains on."""
    import deepspeed_autoep

    engine, *_ = deepspeed_autoep.initialize(model=make_model(case.family, seed=5), config=ds_config(case))
    assert engine.optimizer is None
    engine.load_checkpoint(folder)
    engine.save_checkpoint(f"{folder}/again", client_state={"seen": 7})
    batch = my_share(make_batches(case.steps, case.samples, case.length)[SAVED_AFTER], case)
    loss = mean_over_data(engine(input_ids=batch, labels=batch).loss, engine)
    engine.destroy()
    return [loss]


def test_an_engine_without_an_optimizer(good, tmp_path):
    folder = copied(good, tmp_path)
    loss = run_on(2, evaluates, replace(SMALL, zero=0), str(folder))[0][0]
    assert relative(loss, reference_of(SMALL).losses[SAVED_AFTER]) < 1e-5
    result, records, *_ = run_on(2, loads_with, SMALL, str(folder / "again"), {})[0]
    assert result[0].endswith(TAG) and any("no optimizer states" in record for record in records)


def test_the_checkpoints_own_folder(good):
    result, *_ = run_on(2, loads_with, SMALL, str(good / TAG), {})[0]
    assert result[0] == str(good / TAG)


def test_nothing_to_load(tmp_path):
    result, records, *_ = run_on(2, loads_with, SMALL, str(tmp_path), {})[0]
    assert result == (None, None) and any("latest" in record for record in records)


def saves_without_states(case: Case, folder: str):
    return train_and_save(case, folder, False, {"exclude_optimizer_states": True, "tag": TAG})


def test_a_checkpoint_without_optimizer_states_says_so(tmp_path, good):
    run_on(2, saves_without_states, SMALL, str(tmp_path))
    result, records, _, states, steps = run_on(2, loads_with, SMALL, str(tmp_path), {})[0]
    assert any("no optimizer states" in record for record in records)
    assert result[0] and states == 0 and steps == SAVED_AFTER

    def size(folder):
        return sum(path.stat().st_size for path in folder.rglob("*.distcp"))

    assert size(tmp_path) < 0.5 * size(good)


def test_a_file_of_another_save_is_named(good, tmp_path):
    folder = copied(good, tmp_path)
    (folder / TAG / "tensors" / "__7_0_0.distcp").write_bytes(b"x")
    (folder / TAG / "tokenizer.json").write_text("{}")  # beside the tensors files may be put
    for message, unchanged in run_on(2, refused_load, SMALL, str(folder)):
        assert "__7_0_0.distcp" in message and "tokenizer" not in message and unchanged


# What is in it


def test_each_byte_is_written_once_and_by_all_ranks(tmp_path):
    """Unique state: fp32 weights and two moments."""
    case = replace(CASE, overrides=(("vocab_size", 4096), ("hidden_size", 128), ("intermediate_size", 256)))
    for zero in (0, 1):
        folder = tmp_path / str(zero)
        run_on(4, train_and_save, replace(case, zero=zero), str(folder))
        files = [path.stat().st_size for path in folder.rglob("*.distcp")]
        parameters = sum(p.numel() for p in make_model("mixtral", **dict(case.overrides)).parameters())
        assert len(files) == 4
        assert 3 * 4 * parameters <= sum(files) < 1.06 * 3 * 4 * parameters  # small tensors: headers weigh more than in a real model
        assert max(files) < 1.3 * min(files)


# Calls that are refused


def refused_saves(case: Case, folder: str) -> list[str]:
    engine = build_engine(case)
    rank = dist.get_rank()
    messages = []
    for options in (
        {"tag": "a/b"},
        {"tag": ".hidden"},
        {"tag": "latest"},
        {"tag": f"rank{rank}"},
        {"client_state": [1]} if rank == 0 else {},
        {"client_state": {"epoch": 3, "metric": lambda: 0}},
        {"save_dir": None},
    ):
        try:
            engine.save_checkpoint(**{"save_dir": folder, **options})
            messages.append("saved")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    engine.destroy()
    return messages


def test_saves_that_are_refused_on_every_rank(tmp_path):
    for messages in run_on(2, refused_saves, SMALL, str(tmp_path)):
        assert all("legal" in message for message in (*messages[:3], messages[4])), messages
        assert "rank0" in messages[3] and "rank1" in messages[3]
        assert "client_state['metric']" in messages[5] and "function" in messages[5]
        assert "save_dir=None" in messages[6]
    assert list(tmp_path.iterdir()) == []


def accumulates(case: Case, folder: str) -> list[float]:
    """A load discards gradients of a backward pass before it."""
    engine = build_engine(case)
    batch = my_share(torch.arange(3, 3 + 8 * 9).remainder(60).view(8, 9) + 3, case)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.load_checkpoint(folder)
    curve = run_steps(engine, case, SAVED_AFTER, STEPS)
    engine.destroy()
    return [loss for loss, _ in curve]


def test_gradients_before_a_load_are_discarded(good):
    losses = run_on(2, accumulates, SMALL, str(good))[0]
    assert all(relative(mine, right) < 1e-5 for mine, right in zip(losses, reference_of(SMALL).losses[SAVED_AFTER:], strict=True))


def saves_before_a_step(case: Case, folder: str, load: bool) -> list:
    engine = build_engine(case, make_model(case.family, seed=5 if load else 0))
    if load:
        run_steps(engine, case, 3, 5)  # its states must go
        engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    curve = run_steps(engine, case, 0, 3)
    engine.destroy()
    return curve


@pytest.mark.parametrize("zero", [0, 1])
def test_a_checkpoint_before_the_first_step(zero, tmp_path):
    case = replace(SMALL, zero=zero)
    assert run_on(2, saves_before_a_step, case, str(tmp_path), False) == run_on(2, saves_before_a_step, case, str(tmp_path), True)
