"""What becomes of a run: Hugging Face folders from an engine and from a checkpoint, and a look at a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open

from deepspeed_autoep.checkpoint.reader import CheckpointReader, ModelTensors
from deepspeed_autoep.cli.main import main, parse_size
from deepspeed_autoep.errors import CheckpointError
from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.runs import run_steps
from tests.unit.training import Case, build_engine

CASES = [
    Case("mixtral", 4, 2, 2, 1, samples=8, etp=2),
    Case("gpt_oss", 4, 2, 4, 2, samples=8, dtype="bf16"),
    Case("deepseek_v3", 4, 4, 2, 0, samples=8, etp=2),
    Case("qwen3_moe", 2, 1, 1, 1, samples=8, etp=2, overrides=(("tie_word_embeddings", True),)),
]
SHARD = 40_000  # bytes: several files


def train_and_export(case: Case, folder: str):
    import deepspeed_autoep

    engine = build_engine(case)
    run_steps(engine, case, 0, 1)
    assert engine.save_16bit_model(f"{folder}/engine", max_shard_bytes=SHARD) is True
    engine.save_checkpoint(f"{folder}/saved")
    state = deepspeed_autoep.consolidated_state_dict(engine)
    batch = make_batches(1, 2, 9)[0]
    with torch.no_grad():
        logits = engine.module(input_ids=batch).logits.float()
    engine.destroy()
    return state, logits


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exports_load_with_the_same_bits_and_logits(case, tmp_path):
    state, logits = run_on(case.world, train_and_export, case, str(tmp_path))[0]
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "command"), "--max-shard-size", f"{SHARD / 1e6}MB"]) == 0
    assert len(list((tmp_path / "engine").glob("model-*.safetensors"))) > 1

    reference = make_model(case.family, **dict(case.overrides)).to(torch.bfloat16 if case.dtype == "bf16" else torch.float32)
    reference.load_state_dict(state)
    reference.save_pretrained(tmp_path / "reference")
    right = files_of(tmp_path / "reference")
    for way in ("engine", "command"):
        mine = files_of(tmp_path / way)
        assert mine.keys() == right.keys()
        assert all(mine[name].dtype == right[name].dtype and torch.equal(mine[name], right[name]) for name in right)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / way)
        assert all(torch.equal(loaded.state_dict()[name], value) and loaded.state_dict()[name].dtype == value.dtype for name, value in state.items())
        with torch.no_grad():
            found = loaded(input_ids=make_batches(1, 2, 9)[0]).logits.float()
        tolerance = 2e-2 if case.dtype == "bf16" else 1e-5
        assert (found - logits).abs().max() < tolerance * logits.abs().max()


SMALL = Case("mixtral", 2, 1, 2, 1, samples=8)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    run_on(2, train_and_export, SMALL, str(folder))
    return folder


def test_a_checkpoint_reads_by_slices(exported):
    reader = CheckpointReader(exported / "saved")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = reader.read(name)
    box = ((3, 7), (10, 90), (0, 5))
    assert torch.equal(reader.read(name, box=box), whole[3:7, 10:90, 0:5])
    assert reader.states(name) == dict.fromkeys(("model", "exp_avg", "exp_avg_sq"), torch.float32)
    assert reader.read(name, "exp_avg").shape == whole.shape and reader.read(name, "exp_avg").any()
    with pytest.raises(CheckpointError, match="no slice"):
        reader.read(name, box=((0, 9), (0, 1), (0, 1)))
    exporting = ModelTensors(reader, torch.bfloat16)
    assert torch.equal(exporting.read(name, 5), whole[5:6].bfloat16())


def test_export_in_another_dtype(exported, tmp_path):
    assert main(["export", str(exported / "saved" / "global_step1"), str(tmp_path / "out"), "--dtype", "bf16", "--no-verify"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    reader = CheckpointReader(exported / "saved")
    assert all(torch.equal(value, reader.read(name).bfloat16()) for name, value in loaded.state_dict().items())


def test_inspect(exported, capsys):
    assert main(["inspect", str(exported / "saved"), "--match", "layers.0", "--slices"]) == 0
    text = capsys.readouterr().out
    for words in ("MixtralForCausalLM", "2 ranks, tp 1, ep 2, etp 1, ZeRO-1", "global_steps 1", "AdamW", "whole, by their checksums", "[0:4, 0:96, 0:32]"):
        assert words in text, text
    assert "layers.1" not in text
    assert main(["inspect", str(exported / "saved"), "--json", "--no-verify"]) == 0
    document = json.loads(capsys.readouterr().out)
    entry = document["tensors"]["model.layers.1.mlp.experts.down_proj"]
    assert entry["shape"] == [8, 32, 48] and entry["stored"] == dict.fromkeys(("model", "exp_avg", "exp_avg_sq"), "float32")
    assert entry["bytes"] == 3 * 4 * 8 * 32 * 48 and document["verified"] is False
    assert document["parameters"] == sum(p.numel() for p in make_model("mixtral").parameters())


def copied(exported: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(exported / "saved", tmp_path / "copy")
    return tmp_path / "copy" / "global_step1"


@pytest.mark.parametrize("name", ["tensors/__0_0_0.distcp", "tensors/.metadata", "checkpoint.json", "config.json"])
@pytest.mark.parametrize("command", ["inspect", "export"])
def test_commands_name_damage(command, name, exported, tmp_path, capsys):
    folder = copied(exported, tmp_path)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / name).write_bytes(content)
    out = [str(tmp_path / "out")] if command == "export" else []
    assert main([command, str(folder), *out]) == 1
    assert name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_by_its_tag(exported, capsys, tmp_path):
    import shutil

    assert main(["inspect", str(exported / "saved"), "--tag", "global_step1", "--no-verify"]) == 0
    assert "global_step1: Mixtral" in capsys.readouterr().out
    shutil.copytree(exported / "saved" / "global_step1", tmp_path / "a")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "['a']" in capsys.readouterr().err
    assert main(["inspect", __file__]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_commands_name_what_is_not_there(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 1
    assert "checkpoint.json is missing" in capsys.readouterr().err
    (tmp_path / "latest").write_text("gone")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "gone" in capsys.readouterr().err


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("1.5MiB", 3 * 2**19), ("300", 300), ("2kb", 2000)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1GB", "0"])
def test_wrong_sizes(text, capsys):
    with pytest.raises(SystemExit):
        main(["export", "a", "b", f"--max-shard-size={text}"])
    assert "legal" in capsys.readouterr().err


def refused_exports(case: Case, folder: str) -> list[str]:
    engine = build_engine(case)
    (Path(folder) / "full").mkdir(exist_ok=True)
    (Path(folder) / "full" / "model.safetensors").write_bytes(b"x")
    (Path(folder) / "checkpoint").mkdir(exist_ok=True)
    (Path(folder) / "checkpoint" / "checkpoint.json").write_bytes(b"{}")
    dist.barrier()
    messages = []
    for out, options in (
        ("a", {"save_filename": "model.bin"}),
        ("a", {"exclude_frozen_parameters": True}),
        ("a", {"max_shard_bytes": 0}),
        ("a", {"tokenizer": "nowhere"}),
        ("full", {}),
        ("checkpoint", {"overwrite": True}),
    ):
        try:
            engine.save_16bit_model(f"{folder}/{out}", **options)
            messages.append("exported")
        except Exception as error:
            messages.append(str(error))
    engine.destroy()
    return messages


def test_exports_that_are_refused_on_every_rank(tmp_path):
    words = ["save_filename", "exclude_frozen_parameters", "max_shard_bytes", "nowhere", "full", "is a checkpoint"]
    for messages in run_on(2, refused_exports, SMALL, str(tmp_path)):
        assert all(word in message for word, message in zip(words, messages, strict=True)), messages
    assert not (tmp_path / "a").exists()


def wrong_expert(case: Case, folder: str):
    """A source that takes every expert from the first EP rank."""
    from deepspeed_autoep.engine import export_source

    original = export_source.gather_expert
    export_source.gather_expert = lambda local, tensor, handles, expert: original(local, tensor, handles, expert % local.shape[0])
    try:
        return train_and_export(case, folder)
    finally:
        export_source.gather_expert = original


def test_a_wrong_expert_would_show(tmp_path):
    case = replace(SMALL, ep=2)
    state, _ = run_on(2, wrong_expert, case, str(tmp_path))[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "engine").state_dict()
    assert any(not torch.equal(loaded[name], value) for name, value in state.items())
