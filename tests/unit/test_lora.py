"""PEFT's LoRA on layers that are cut, against one plain process with the same PeftModel."""

from __future__ import annotations

import pytest

from tests.unit.lora import ATTENTION, EXPERTS, Lora, reference_of_lora, train_lora
from tests.unit.pool import run_on
from tests.unit.test_parity import LOSS_AND_NORM, PARAMETER
from tests.unit.training import Case, worst_errors

BOTH = Lora(ATTENTION, EXPERTS)
MLA = Lora(
    r".*(kv_a_proj_with_mqa|kv_b_proj|o_proj)|.*layers\.0\.mlp\.\w+_proj|.*shared_experts\.\w+_proj",
    EXPERTS,
)
ROUTER = Lora((*ATTENTION, "lm_head"), (*EXPERTS, "mlp.gate.weight"))

CASES = [
    (Case("mixtral", 4, 2, 2, 1), ROUTER),
    (Case("mixtral", 4, 2, 2, 2, etp=2), BOTH),
    (Case("mixtral", 4, 1, 2, 0, etp=2), BOTH),
    (Case("qwen3_moe", 4, 2, 4, 2), Lora(options=(("use_rslora", True), ("lora_bias", True)))),
    (Case("qwen3_moe", 4, 4, 2, 0, etp=2), BOTH),
    (Case("qwen3_moe", 4, 2, 2, 1, etp=2), Lora(ATTENTION, EXPERTS, base=True)),
    (Case("gpt_oss", 4, 2, 2, 1, etp=2), BOTH),
    (Case("gpt_oss", 4, 1, 2, 2, etp=2), Lora((), EXPERTS)),
    (Case("deepseek_v3", 4, 2, 2, 0, etp=2), MLA),
    (Case("olmoe", 4, 2, 2, 1), Lora(ATTENTION, EXPERTS[1:])),
    (Case("mixtral", 4, 2, 2, 1, etp=2, options=(("checkpointing", "nonreentrant"),)), BOTH),
    (Case("gpt_oss", 4, 2, 1, 0, etp=2, expert_config=(("expert_backend", "model"),)), BOTH),
    (Case("qwen3_moe", 4, 2, 2, 2, etp=2), Lora(ATTENTION, EXPERTS, adapters=("default", "second"))),
]


@pytest.mark.parametrize(("case", "lora"), CASES, ids=str)
def test_parity(case, lora):
    right = reference_of_lora(case, lora)
    assert min(right.norms) > case.clip, "clipping must be active"
    errors = worst_errors(run_on(case.world, train_lora, case, lora)[0], right)
    assert errors["loss"] <= LOSS_AND_NORM and errors["norm"] <= LOSS_AND_NORM and errors["parameter"] <= PARAMETER, errors
