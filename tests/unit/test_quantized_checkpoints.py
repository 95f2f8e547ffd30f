"""Checkpoints of models with quantized experts: values of one expert travel with it, shared ones once, the structure before both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("modelopt", reason="needs nvidia-modelopt, of the extra 'quantization'")

from deepspeed_autoep.checkpoint.quantized import QUANTIZATION, checkpoint_structure
from deepspeed_autoep.checkpoint.reader import CheckpointReader
from deepspeed_autoep.quantization import restore_structure
from tests.unit.models import make_model
from tests.unit.pool import run_on
from tests.unit.quantized import EXPERTS_ONLY, make_quantized
from tests.unit.runs import run_steps
from tests.unit.training import Case, build_engine, engine_of, relative

TRAINED = ["FP8_DEFAULT_CFG", "INT8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG", "INT4_BLOCKS_OF_8", "INT8_DEFAULT_CFG and smoothed experts"]
# Model-Optimizer 0.47 has a CPU forward for every one of them but this.
CALIBRATED = ["NVFP4_STATIC"]
BASE = Case("mixtral", 4, 2, 2, 1, "SGD", samples=8)
SAVED = [BASE, replace(BASE, ep=4)]
LOADED = [replace(BASE, tp=1, ep=2, etp=2, zero=2), replace(BASE, world=2, tp=1, ep=1, zero=0), replace(BASE, world=2, tp=2, ep=2, etp=1, zero=0)]


def quantized_buffers(state: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if "quantizer" in name}


SMOOTHED = "INT8_DEFAULT_CFG and smoothed experts"


def make(case: Case, name: str, left_alone: tuple) -> torch.nn.Module:
    """Model-Optimizer smooths dense layers only; on experts the scales are set by hand."""
    model = make_quantized(case.family, name.split(" and ")[0], left_alone, **dict(case.overrides))
    if name == SMOOTHED:
        for layer in model.model.layers:
            experts = layer.mlp.experts
            experts.gate_up_proj_input_quantizer.pre_quant_scale = torch.linspace(0.9, 1.1, 32)
            experts.down_proj_input_quantizer.pre_quant_scale = torch.linspace(0.8, 1.2, 48)
    return model


def save(case: Case, name: str, folder: str, left_alone: tuple = EXPERTS_ONLY):
    """After a step, where the configuration has a forward: the whole state."""
    import deepspeed_autoep

    with engine_of(case, make(case, name, left_alone)) as engine:
        if name in TRAINED:
            run_steps(engine, case, 0, 1)
        engine.save_checkpoint(folder, tag="t")
        state = deepspeed_autoep.consolidated_state_dict(engine)
        return state, run_steps(engine, case, 1, 3) if name in TRAINED else []


def load(case: Case, name: str, folder: str):
    """Into a model of other weights that gets its structure from the checkpoint."""
    import deepspeed_autoep

    model = restore_structure(make_model(case.family, seed=5), checkpoint_structure(folder))
    with engine_of(case, model) as engine:
        engine.load_checkpoint(folder)
        state = deepspeed_autoep.consolidated_state_dict(engine)
        return state, run_steps(engine, case, 1, 3) if name in TRAINED else []


def check_round(before: Case, after: Case, name: str, folder: Path) -> None:
    saved, curve = run_on(before.world, save, before, name, str(folder))[0]
    loaded, other = run_on(after.world, load, after, name, str(folder))[0]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype for key, value in saved.items())
    buffers = quantized_buffers(saved)
    assert any(key.endswith(".7._amax") for key in buffers) and all(value.isfinite().all() for value in buffers.values())
    for mine, right in zip(other, curve, strict=True):
        assert relative(mine[0], right[0]) < 1e-5 and relative(mine[1], right[1]) < 1e-5
    ends = {"NVFP4_STATIC": "_global_amax", SMOOTHED: "down_proj_input_quantizer._pre_quant_scale"}.get(name, "_amax")
    assert any(key.endswith(ends) for key in buffers)
    # Each value is written once.
    stored = {key: value.numel() for key, value in buffers.items()}
    reader = CheckpointReader(folder)
    list(reader.verify())
    assert {key: reader.read(key).numel() for key in reader.tensors() if "quantizer" in key} == stored


PAIRS = [(before, after, name) for name in TRAINED + CALIBRATED for before in SAVED for after in (before, *LOADED)]


def in_every_run(place: int, name: str) -> bool:
    """At its own topology, and one other."""
    return place % 4 == 0 or (name in (SMOOTHED, "NVFP4_STATIC") and place % 4 == 1) or place % 8 == 6


@pytest.mark.parametrize(
    "before, after, name",
    [pytest.param(*pair, marks=[] if in_every_run(place, pair[2]) else pytest.mark.full) for place, pair in enumerate(PAIRS)],
    ids=str,
)
def test_bit_equal(before, after, name, tmp_path):
    check_round(before, after, name, tmp_path)


@pytest.mark.parametrize("name", ["INT8_DEFAULT_CFG", "FP8_DEFAULT_CFG"])
def test_transposed_experts_with_biases(name, tmp_path):
    before = replace(BASE, family="gpt_oss", ep=4)
    saved, _ = run_on(4, save, before, name, str(tmp_path))[0]
    loaded, _ = run_on(4, load, replace(before, tp=1, ep=2, etp=2), name, str(tmp_path))[0]
    assert quantized_buffers(saved) and all(torch.equal(loaded[key], value) for key, value in saved.items())


def test_smoothing_of_dense_layers(tmp_path):
    """Model-Optimizer's SmoothQuant scales inputs of dense layers, which keep their quantizers where they are whole."""
    saved, curve = run_on(4, save, replace(BASE, tp=1, ep=4), "INT8_SMOOTHQUANT_CFG", str(tmp_path), ())[0]
    assert any(name.endswith("_pre_quant_scale") and value.numel() > 1 for name, value in saved.items())
    loaded, other = run_on(2, load, replace(BASE, world=2, tp=1, ep=2, zero=2), "INT8_SMOOTHQUANT_CFG", str(tmp_path))[0]
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], value) for name, value in saved.items())
    for mine, right in zip(other, curve, strict=True):
        assert relative(mine[0], right[0]) < 1e-5 and relative(mine[1], right[1]) < 1e-5


def refused(case: Case, quantization: str | None, folder: str) -> str:
    from deepspeed_autoep.errors import AutoEPError

    model = make_model(case.family) if quantization is None else make_quantized(case.family, quantization)
    engine = build_engine(case, model)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    try:
        engine.load_checkpoint(folder)
        message = "loaded"
    except AutoEPError as error:
        message = str(error)
    assert all(torch.equal(old, new) for old, new in zip(before, engine.module.parameters(), strict=True))
    engine.destroy()
    return message


@pytest.fixture(scope="module")
def int8(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    run_on(4, save, BASE, "INT8_DEFAULT_CFG", str(folder))
    return folder


@pytest.mark.parametrize("quantization", [None, "FP8_DEFAULT_CFG"])
def test_another_structure_is_refused(quantization, int8):
    for message in run_on(2, refused, replace(BASE, world=2, tp=1), quantization, str(int8)):
        assert "restore_structure" in message, message


def test_a_damaged_structure_is_named(int8):
    path = int8 / "t" / QUANTIZATION
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-9])
        for message in run_on(2, refused, replace(BASE, world=2, tp=1), "INT8_DEFAULT_CFG", str(int8)):
            assert QUANTIZATION in message and "damaged" in message
    finally:
        path.write_bytes(content)


def by_local_index(case: Case, name: str, folder: str) -> str:
    """Names that count each rank's experts from 0: what the union of slices is for."""
    from deepspeed_autoep.engine import placements
    from deepspeed_autoep.errors import CheckpointError

    original = placements.describe_buffers

    def local(module):
        first = module.autoep.shard.first
        return [replace(part, name=part.name.replace(f".{first}._amax", ".0._amax")) for part in original(module)]

    placements.describe_buffers = local
    try:
        save(case, name, folder)
    except CheckpointError as error:
        return str(error)
    finally:
        placements.describe_buffers = original
    return "saved"


def test_local_indices_would_be_refused(tmp_path):
    """Two halves of the experts under one name: refused before anything is written."""
    for message in run_on(4, by_local_index, BASE, "FP8_DEFAULT_CFG", str(tmp_path)):
        assert "_amax" in message and "could not be written" in message, message
    assert not list(tmp_path.glob("*"))
