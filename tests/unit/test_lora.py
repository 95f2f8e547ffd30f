"""PEFT's LoRA on layers that are cut, against one plain process with the same adapters."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch.distributed as dist
from deepspeed.module_inject import layers
from deepspeed.module_inject.autotp_config import AutoTPConfig

from deepspeed_autoep import peft_adapters
from deepspeed_autoep.engine.column_inputs import SharedInputLinear
from deepspeed_autoep.moe.discovery import find_experts
from deepspeed_autoep.moe.weight_layout import ExpertTensor
from deepspeed_autoep.tensor_parallel import plan_from_model
from tests.unit.lora import ATTENTION, EXPERTS, Lora, adapt, make_lora_model, reference_of_lora, train_lora
from tests.unit.models import FAMILIES, make_model
from tests.unit.pool import run_on
from tests.unit.test_parity import LOSS_AND_NORM, PARAMETER, _without_verification
from tests.unit.test_tensor_parallel import with_plan
from tests.unit.training import Case, build_engine, parameter_error, train, worst_errors

BOTH = Lora(ATTENTION, EXPERTS)
MLA = Lora(r".*(kv_a_proj_with_mqa|kv_b_proj|o_proj)|.*layers\.0\.mlp\.\w+_proj|.*shared_experts\.\w+_proj", EXPERTS)
HEAD_AND_ROUTER = Lora((*ATTENTION, "lm_head"), (*EXPERTS, "mlp.gate.weight"))
BIASED = Lora(options=(("use_rslora", True), ("lora_bias", True), ("modules_to_save", ("lm_head",))))
OWN_PLAN = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*[qkv]_proj\.(base_layer|lora_B\.default)\.weight$"], "partition_type": "column"},
            {"patterns": [r".*o_proj\.(base_layer|lora_A\.default)\.weight$"], "partition_type": "row"},
        ],
    },
}

CASES = [
    (Case("mixtral", 4, 2, 2, 1), HEAD_AND_ROUTER),
    (Case("mixtral", 4, 2, 2, 2, etp=2), BOTH),
    (Case("mixtral", 4, 1, 2, 0, etp=2), BOTH),
    (Case("mixtral", 4, 2, 2, 1, config=(("tensor_parallel", OWN_PLAN),)), Lora()),
    (Case("qwen3_moe", 4, 2, 4, 2), BIASED),
    (Case("qwen3_moe", 4, 4, 2, 0, etp=2), replace(BOTH, injected=True)),
    (Case("qwen3_moe", 4, 2, 2, 1, etp=2), replace(BOTH, base=True)),
    (Case("qwen3_moe", 4, 2, 2, 2, etp=2), replace(BOTH, adapters=("default", "second"))),
    # One expert a rank, for which PEFT computes its delta as a linear layer's.
    (Case("mixtral", 4, 2, 4, 1, overrides=(("num_local_experts", 4),)), Lora((), EXPERTS)),
    (Case("gpt_oss", 4, 2, 2, 1, etp=2), BOTH),
    (Case("gpt_oss", 4, 1, 2, 2, etp=2), Lora((), EXPERTS)),
    (Case("gpt_oss", 4, 2, 1, 0, etp=2, expert_config=(("expert_backend", "model"),)), BOTH),
    (Case("deepseek_v3", 4, 2, 2, 0, etp=2), MLA),
    (Case("olmoe", 4, 2, 4, 1), Lora(ATTENTION, EXPERTS[1:])),
    (Case("mixtral", 4, 2, 2, 1, etp=2, options=(("checkpointing", "nonreentrant"),)), BOTH),
]


def name(value) -> str:
    return str(replace(value, config=()) if isinstance(value, Case) else value)


@pytest.mark.parametrize(("case", "lora"), CASES, ids=name)
def test_parity(case, lora):
    right = reference_of_lora(case, lora)
    assert min(right.norms) > case.clip, "clipping must be active"
    errors = worst_errors(run_on(case.world, train_lora, case, lora)[0], right)
    assert errors["loss"] <= LOSS_AND_NORM and errors["norm"] <= LOSS_AND_NORM and errors["parameter"] <= PARAMETER, errors


def _one_half(kind: str, shape: tuple, cut: int | None, _halves: int) -> ExpertTensor:
    return ExpertTensor(kind, shape, cut)


SWITCHED_OFF = {
    # name: (patches, which error must show)
    "adapters_inputs_not_summed": (
        lambda: [
            mock.patch.object(layers, "ColumnParallel", SimpleNamespace(apply=lambda _group, x: x)),
            _without_verification(),
        ],
        "norm",
    ),
    "whole_matrices_over_edp_only": (
        lambda: [mock.patch.object(peft_adapters, "mark_expert_shared_over_etp", lambda _parameter: None)],
        "parameter",
    ),
    "gate_and_up_cut_as_one": (lambda: [mock.patch.object(peft_adapters, "ExpertTensor", _one_half)], "loss"),
}


def train_switched_off(case: Case, lora: Lora, what: str):
    with contextlib.ExitStack() as stack:
        for patch in SWITCHED_OFF[what][0]():
            stack.enter_context(patch)
        return train_lora(case, lora)


@pytest.mark.parametrize("what", SWITCHED_OFF)
def test_parity_sees_it_switched_off(what):
    case = Case("qwen3_moe", 4, 2, 1, 1, etp=2, optimizer="SGD")
    errors = worst_errors(run_on(4, train_switched_off, case, BOTH, what)[0], reference_of_lora(case, BOTH))
    limit = PARAMETER if SWITCHED_OFF[what][1] == "parameter" else LOSS_AND_NORM
    assert errors[SWITCHED_OFF[what][1]] > 10 * limit, errors


def train_and_save(case: Case, lora: Lora, folder: str) -> None:
    model = make_lora_model(case, lora)
    curve = train(case, model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=curve.state)


def test_what_peft_saves_loads_in_one_process(tmp_path):
    case = Case("mixtral", 4, 2, 2, 2, etp=2)
    run_on(4, train_and_save, case, BOTH, str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(make_model("mixtral"), tmp_path).state_dict()
    right, start = reference_of_lora(case, BOTH).state, make_lora_model(case, BOTH).state_dict()
    assert loaded.keys() == right.keys()
    adapters = [key for key in right if "lora_" in key]
    assert len(adapters) == 2 * 2 * (len(ATTENTION) + len(EXPERTS))
    assert max(parameter_error(loaded[key], right[key]) for key in right) <= PARAMETER
    assert min(parameter_error(start[key], right[key]) for key in adapters) > 10 * PARAMETER


def entrances(case: Case):
    """Of each attention block: how many entrances q, k and v have, and which class their lora_B is of."""
    engine = build_engine(case, make_lora_model(case, Lora()))
    found = []
    for block in (module for module in engine.module.modules() if hasattr(module, "q_proj")):
        projections = [block.q_proj, block.k_proj, block.v_proj]
        assert all(type(each.base_layer) is SharedInputLinear for each in projections)
        assert all(type(each.weight) is type(each.base_layer.weight) for each in projections)  # hidden for AutoTP only
        kinds = {type(each.lora_B["default"]) for each in projections} | {type(block.o_proj.lora_A["default"])}
        found.append((len({id(each.base_layer.autoep_entrance) for each in projections}), sorted(kind.__name__ for kind in kinds)))
    engine.destroy()
    return found


def test_adapted_siblings_share_one_entrance():
    assert run_on(4, entrances, Case()) == [[(1, ["LinearAllreduce", "LinearLayer"])] * 2] * 4


def test_lanes_drop_the_same():
    """What lanes hold whole has the same gradient on all of them, whatever lora_dropout drops; else this raises."""
    verified = (("replicated_gradient_sync", "verify"), ("replicated_gradient_verify_interval", 1))
    case, lora = Case(expert_config=verified), Lora(options=(("lora_dropout", 0.5),))
    curve = run_on(4, train_lora, case, lora)[0]
    errors = worst_errors(curve, reference_of_lora(case, Lora()))
    assert 1e-4 < errors["loss"] < 0.2, errors  # dropout is on, and no lane is lost


# Plans


def cuts(model) -> dict[str, tuple]:
    """Name of each weight that is cut -> its spec."""
    plan = plan_from_model(model, [site.name for site in find_experts(model)], 2)
    parsed = AutoTPConfig.from_dict(plan.as_partition_config())
    specs = {key: parsed.find_matching_spec(key) for key, _ in model.named_parameters()}
    return {
        key: (spec.partition_type.value, spec.gather_output, spec.shape)
        for key, spec in specs.items()
        if spec is not None and spec.partition_type.value != "skip"
    }


LINEAR = r".*_proj|.*_mqa|lm_head"


def without_peft(found: dict[str, tuple]) -> dict[str, tuple]:
    plain = {key.removeprefix("base_model.model.").replace(".base_layer", ""): spec for key, spec in found.items()}
    return {key: spec for key, spec in plain.items() if "lora_" not in key}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_cut_as_without_adapters(family):
    found, plain = cuts(adapt(make_model(family), Lora(LINEAR, EXPERTS))), cuts(make_model(family))
    if family == "olmoe":  # a lane would take its slice of o_proj's input: with an adapter it stays whole
        plain = {key: spec for key, spec in plain.items() if "o_proj" not in key}
    assert without_peft(found) == plain
    for key, spec in plain.items():
        layer = "base_model.model." + key.removesuffix(".weight")
        cut = {"row": ["lora_A"], "column": [] if spec[1] else ["lora_B"]}[spec[0]]
        assert {inner: each for inner, each in found.items() if inner.startswith(f"{layer}.lora_")} == {
            f"{layer}.{matrix}.default.weight": spec for matrix in cut
        }


def test_packed_halves_are_cut_alike(monkeypatch):
    plain = with_plan(monkeypatch, {"layers.*.self_attn.q_proj": "packed_colwise"})
    found = cuts(adapt(plain, Lora(("q_proj",))))
    assert len(found) == 4 and set(found.values()) == {("column", False, (2, -1))}
    assert sum("lora_B" in key for key in found) == 2


def test_layers_without_an_adapter_are_cut_too():
    found = cuts(adapt(make_model("mixtral"), Lora(("q_proj",), options=(("layers_to_transform", (1,)),))))
    assert without_peft(found) == cuts(make_model("mixtral"))
    assert [key for key in found if "lora_" in key] == ["base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight"]


@pytest.mark.parametrize("options", [(("modules_to_save", ("lm_head",)),), (("use_dora", True),)], ids=["copy", "dora"])
def test_a_gathered_layer_that_cannot_be_cut_stays_whole(options):
    modules = ("lm_head",) if options[0][0] == "use_dora" else ("q_proj",)
    found = cuts(adapt(make_model("mixtral"), Lora(modules, options=options)))
    assert not any("lm_head" in key for key in found)
    assert without_peft(found).keys() == {key for key in cuts(make_model("mixtral")) if "lm_head" not in key}


def test_stacks_of_matrices():
    """PEFT's own delta is that of the stacks, and a stack goes back to how PEFT stores it."""
    model = make_lora_model(Case("gpt_oss"), Lora((), EXPERTS))
    site = find_experts(model)[0]
    wrapper = model.get_submodule(re.sub(r"\.base_layer$", "", site.name))
    whole = wrapper.get_delta_weight("default")
    assert whole.shape == site.module.gate_up_proj.shape
    adapters = {each.tensor.name: each for each in peft_adapters.expert_adapters(model, site)[2:]}
    a, b = (adapters[key].stacked(site.layout.num_experts) for key in ("lora_A", "lora_B"))
    assert parameter_error((b @ a).transpose(1, 2) * wrapper.scaling["default"], whole) < 1e-6
    for adapter, stack in zip(adapters.values(), (a, b), strict=True):
        assert adapter.flat(stack).equal(adapter.parameter)
