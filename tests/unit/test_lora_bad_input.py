"""What of PEFT cannot be cut exactly: the same clear error on every rank, before anything is cut."""

from __future__ import annotations

import functools

import peft
import pytest
import torch
import torch.distributed as dist

from tests.unit.lora import ATTENTION, EXPERTS, Lora, adapt
from tests.unit.models import make_model
from tests.unit.pool import run_on
from tests.unit.training import Case, ds_config

BASE = ds_config(Case(ep=4))


def with_plan(*specs: tuple[str, str]) -> dict:
    specs = [{"patterns": [pattern], "partition_type": kind} for pattern, kind in specs]
    return {"tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}}


def lora(*modules: str, parameters: tuple = (), family: str = "mixtral", overrides: tuple = (), **options):
    return adapt(make_model(family, **dict(overrides)), Lora(modules, parameters, options=tuple(options.items())))


def other(config, family: str = "mixtral"):
    return peft.get_peft_model(make_model(family), config)


BASE_LAYER, LORA_A, LORA_B = r".*q_proj\.base_layer\.weight$", r".*q_proj\.lora_A\.default\.weight$", r".*q_proj\.lora_B\.default\.weight$"
BAD = {
    # name: (model, configuration, words of the message)
    "dora": (lambda: lora("q_proj", use_dora=True), {}, ["0.self_attn.q_proj'", "(column)", "use_dora=True", "autotp_size to 1"]),
    "dora on rows": (lambda: lora("o_proj", use_dora=True), {}, ["0.self_attn.o_proj'", "(row)", "use_dora=True"]),
    "alora": (
        lambda: lora("k_proj", alora_invocation_tokens=(5,), task_type="CAUSAL_LM"),
        {},
        ["k_proj'", "LoRA variant ['ALoraLinearVariant']", "use_rslora"],
    ),
    "ia3": (lambda: other(peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[])), {}, ["v_proj'", "ia3", "Legal"]),
    "loha": (lambda: other(peft.LoHaConfig(target_modules=["v_proj"], r=2)), {}, ["v_proj'", "loha", "Legal"]),
    "copy": (lambda: lora("q_proj", modules_to_save=("k_proj",)), {}, ["k_proj'", "modules_to_save", "second copy"]),
    "copy of a norm": (
        lambda: lora("q_proj", family="qwen3_moe", modules_to_save=("q_norm",)),
        {},
        ["q_norm'", "(partial)", "modules_to_save"],
    ),
    "weight as a parameter": (lambda: lora(parameters=("q_proj.weight",)), {}, ["q_proj'", "ParamWrapper"]),
    "prompt tuning": (
        lambda: other(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        {},
        ["'default'", "PROMPT_TUNING", "autotp_size=2"],
    ),
    "tied adapters": (
        lambda: lora("lm_head", "embed_tokens", ensure_weight_tying=True, overrides=(("tie_word_embeddings", True),)),
        {},
        ["'default'", "ensure_weight_tying=True", "Legal is False"],
    ),
    "copy of experts": (lambda: lora("q_proj", modules_to_save=("experts",)), {}, ["mlp.experts'", "target_parameters"]),
    "biases of experts": (
        lambda: lora(parameters=("mlp.experts.gate_up_proj_bias",), family="gpt_oss"),
        {},
        ["mlp.experts'", "'gate_up_proj_bias'", "['gate_up_proj', 'down_proj']"],
    ),
    "one expert a rank": (
        lambda: lora(parameters=EXPERTS, family="gpt_oss", overrides=(("num_local_experts", 4),)),
        {},
        ["mlp.experts", "autoep_size=4", "one expert on a rank", "below"],
    ),
    "plan of names before PEFT": (
        lambda: lora("q_proj"),
        with_plan((r".*q_proj\.weight$", "column")),
        ["q_proj.weight'", "q_proj.base_layer.weight'"],
    ),
    "plan without lora_B": (
        lambda: lora("q_proj"),
        with_plan((BASE_LAYER, "column")),
        ["q_proj.base_layer.weight'", "q_proj.lora_B.default.weight'", "nothing (whole)", "partition_type='column'"],
    ),
    "plan without lora_A": (
        lambda: lora("q_proj"),
        with_plan((BASE_LAYER, "row"), (LORA_B, "row")),
        ["q_proj.lora_A.default.weight'", "nothing (whole)", "partition_type='row'"],
    ),
    "plan with both": (
        lambda: lora("q_proj"),
        with_plan((BASE_LAYER, "column"), (LORA_B, "column"), (LORA_A, "column")),
        ["q_proj.lora_A.default.weight'", "legal for the latter is nothing (whole)"],
    ),
    "plan that cuts adapters only": (
        lambda: lora("q_proj"),
        with_plan((LORA_B, "column")),
        ["q_proj.base_layer.weight' as nothing (whole)", "q_proj.lora_B.default.weight'"],
    ),
    "plan over dora": (lambda: lora("q_proj", use_dora=True), with_plan((BASE_LAYER, "column")), ["q_proj'", "use_dora=True"]),
}


def attempts(only_on: int | None) -> list[tuple[str, str]]:
    """Of each bad input (on rank ``only_on``, or all): the error's type and text."""
    import deepspeed_autoep

    found = []
    for build, config, _ in BAD.values():
        bad = only_on in (None, dist.get_rank())
        model = build() if bad else lora(*ATTENTION)
        try:
            deepspeed_autoep.initialize(
                model=model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), config=BASE | config if bad else BASE
            )
        except Exception as caught:
            found.append((type(caught).__name__, str(caught)))
        else:
            found.append(("nothing", ""))
    return found


@functools.cache
def results(only_on: int | None) -> list[list[tuple[str, str]]]:
    return run_on(4, attempts, only_on)


@pytest.mark.parametrize("only_on", [None, 2])
@pytest.mark.parametrize("name", BAD)
def test_bad_adapters(name, only_on):
    position = list(BAD).index(name)
    for rank, found in enumerate(results(only_on)):
        kind, message = found[position]
        assert kind == ("ModelError" if only_on in (None, rank) else "RankMismatchError"), message
        for word in BAD[name][2]:
            assert word in message, message
