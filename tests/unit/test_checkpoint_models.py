"""Models as users have them, saved and loaded under another topology: frozen, tied and mixed parameters, buffers, LoRA, meta device."""

from dataclasses import replace

import pytest
import torch

from deepspeed_autoep.checkpoint.metadata import read_manifest
from tests.unit.lora import EXPERTS, Lora, make_lora_model
from tests.unit.models import make_model
from tests.unit.pool import run_on
from tests.unit.runs import STEPS, run_steps, save_or_load
from tests.unit.training import Case, build_engine, relative

CASE = Case("mixtral", 4, 2, 2, 1, steps=STEPS, samples=8)



def frozen_round(case: Case, folder: str, load: bool, exclude: bool = False):
    import deepspeed_autoep

    model = make_model(case.family, seed=5 if load else 0, **dict(case.overrides))
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    engine = build_engine(case, model)
    if load:
        engine.load_checkpoint(folder)
    else:
        run_steps(engine, case, 0, 2)
        for _, buffer in engine.module.named_buffers():
            if buffer.is_floating_point() and buffer.shape == (8,):
                buffer.copy_(torch.arange(8.0))  # a load-balancing bias
        engine.save_checkpoint(folder, exclude_frozen_parameters=exclude)
    state = deepspeed_autoep.consolidated_state_dict(engine)
    engine.destroy()
    return state


FROZEN = [
    (replace(CASE, overrides=(("tie_word_embeddings", True),)), replace(CASE, world=2, tp=1, ep=1, zero=0, overrides=(("tie_word_embeddings", True),))),
    (replace(CASE, family="gpt_oss", tp=1, etp=2), replace(CASE, family="gpt_oss", world=4, tp=4, ep=4, zero=2)),
]


@pytest.mark.parametrize("pair", FROZEN, ids=str)
def test_frozen_and_tied_parameters(pair, tmp_path):
    before, after = pair
    saved = run_on(before.world, frozen_round, before, str(tmp_path), False)[0]
    loaded = run_on(after.world, frozen_round, after, str(tmp_path), True)[0]
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_frozen_parameters_can_be_left_out(tmp_path):
    saved = run_on(4, frozen_round, CASE, str(tmp_path), False, True)[0]
    manifest = read_manifest(tmp_path / "global_step2")
    left_out = {name for name, entry in manifest.tensors.items() if not entry.stored}
    assert left_out == {"model.embed_tokens.weight", "model.layers.0.mlp.experts.down_proj"}
    loaded = run_on(4, frozen_round, CASE, str(tmp_path), True)[0]
    own = make_model("mixtral", seed=5).state_dict()
    for name in saved:
        assert torch.equal(loaded[name], own[name] if name in left_out else saved[name])


DEEPSEEK = replace(CASE, family="deepseek_v3", world=4, tp=2, ep=4)


def buffers_round(case: Case, folder: str, load: bool):
    import deepspeed_autoep

    engine = build_engine(case, make_model(case.family, seed=5 if load else 0))
    if load:
        engine.load_checkpoint(folder)
    else:
        run_steps(engine, case, 0, 1)
        for name, buffer in engine.module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-1, 1, buffer.numel()))
        engine.save_checkpoint(folder)
    state = deepspeed_autoep.consolidated_state_dict(engine)
    engine.destroy()
    return state


def test_buffers(tmp_path):
    saved = run_on(4, buffers_round, DEEPSEEK, str(tmp_path), False)[0]
    assert any(name.endswith("e_score_correction_bias") and value.any() for name, value in saved.items())
    loaded = run_on(2, buffers_round, replace(DEEPSEEK, world=2, tp=1, ep=1), str(tmp_path), True)[0]
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


# LoRA


def lora_round(case: Case, lora: Lora, folder: str, load: bool):
    import deepspeed_autoep

    model = make_lora_model(case, lora)
    if load:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
    engine = build_engine(case, model)
    save_or_load(engine, case, folder, load)
    state = deepspeed_autoep.consolidated_state_dict(engine)
    curve = run_steps(engine, case, 2, 4)
    engine.destroy()
    return state, curve


LORA = [
    (replace(CASE, etp=2), replace(CASE, world=2, tp=1, ep=2, zero=0), Lora(parameters=EXPERTS)),
    (replace(CASE, family="gpt_oss", tp=1, etp=2, zero=2), replace(CASE, family="gpt_oss", tp=4, ep=4), Lora(parameters=EXPERTS)),
]


@pytest.mark.parametrize("before, after, lora", LORA, ids=str)
def test_adapters(before, after, lora, tmp_path):
    state, curve = run_on(before.world, lora_round, before, lora, str(tmp_path), False)[0]
    loaded, other = run_on(after.world, lora_round, after, lora, str(tmp_path), True)[0]
    assert any("lora_A" in name for name in state) and all(torch.equal(loaded[name], state[name]) for name in state)
    for mine, right in zip(other, curve, strict=True):
        assert relative(mine[0], right[0]) < 1e-5 and relative(mine[1], right[1]) < 1e-5


# A model on the meta device, and one of two dtypes


def round_of(case: Case, folder: str, load: bool, on_meta: bool, mixed: bool):
    import deepspeed_autoep

    if on_meta:
        with torch.device("meta"):
            model = make_model(case.family)
    else:
        model = make_model(case.family, seed=5 if load else 0)
    if mixed:
        model.bfloat16()
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.float()
                module.register_forward_pre_hook(lambda gate, inputs: (inputs[0].float(), *inputs[1:]))
    engine = build_engine(case, model)
    save_or_load(engine, case, folder, load)
    state = deepspeed_autoep.consolidated_state_dict(engine)
    curve = run_steps(engine, case, 2, 4)
    engine.destroy()
    return state, curve


@pytest.mark.parametrize("saving", [True, False], ids=["saved", "loaded"])
def test_a_model_that_was_on_meta(saving, tmp_path):
    make_model("mixtral", seed=3).save_pretrained(tmp_path / "weights")
    streamed = (("initial_weights", str(tmp_path / "weights")),)
    before = replace(CASE, expert_config=streamed) if saving else CASE
    after = replace(CASE, world=2, tp=2, ep=1, zero=0, expert_config=() if saving else streamed)
    state, curve = run_on(4, round_of, before, str(tmp_path / "saved"), False, saving, False)[0]
    loaded, other = run_on(2, round_of, after, str(tmp_path / "saved"), True, not saving, False)[0]
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    for mine, right in zip(other, curve, strict=True):
        assert relative(mine[0], right[0]) < 1e-5 and relative(mine[1], right[1]) < 1e-5


@pytest.mark.parametrize("zero", [0, 2])
def test_a_model_of_two_dtypes(zero, tmp_path):
    """Bit for bit at its own topology."""
    case = replace(CASE, dtype="bf16", zero=zero)
    state, curve = run_on(4, round_of, case, str(tmp_path), False, False, True)[0]
    loaded, other = run_on(4, round_of, case, str(tmp_path), True, False, True)[0]
    assert {value.dtype for value in state.values()} == {torch.float32, torch.bfloat16}
    assert all(torch.equal(loaded[name], state[name]) for name in state) and other == curve
