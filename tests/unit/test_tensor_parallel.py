"""How transformers' tp_plan becomes AutoTP's partition config, read back through DeepSpeed's own parser."""

from __future__ import annotations

import re

import pytest
from deepspeed.module_inject.autotp_config import AutoTPConfig

from deepspeed_autoep.compat import AutoTPCut
from deepspeed_autoep.errors import AutoEPError, ModelError
from deepspeed_autoep.moe.discovery import find_experts
from deepspeed_autoep.tensor_parallel import PartitionPlan, check_shares, make_plan, plan_from_model, plan_regex
from tests.unit.models import make_model

LAYER = r"model\.layers\.\d+\."
ATTENTION = LAYER + r"self_attn\."
# deepseek_v3's first layer is dense, its second has experts.
DENSE_MLP, SHARED_MLP = r"model\.layers\.0\.mlp\.", r"model\.layers\.1\.mlp\.shared_experts\."
# family -> what each parameter must become; the rest must stay whole and fall under no rule.
EXPECTED = {
    "mixtral": {
        "column": ATTENTION + r"[qkv]_proj\.weight",
        "column, gathered": r"lm_head\.weight",
        "row": ATTENTION + r"o_proj\.weight",
        "skip": r"model\.embed_tokens\.weight",
    },
    "qwen3_moe": {
        "column": ATTENTION + r"[qkv]_proj\.weight",
        "column, gathered": r"lm_head\.weight",
        "row": ATTENTION + r"o_proj\.weight",
        "skip": rf"model\.embed_tokens\.weight|{ATTENTION}[qk]_norm\.weight",
    },
    "deepseek_v3": {
        "column": rf"{DENSE_MLP}(gate|up)_proj\.weight|{SHARED_MLP}(gate|up)_proj\.weight",
        "column, gathered": r"lm_head\.weight",
        "row": rf"{DENSE_MLP}down_proj\.weight|{SHARED_MLP}down_proj\.weight",
        "skip": r"model\.embed_tokens\.weight",
    },
    "olmoe": {
        "column, gathered": rf"lm_head\.weight|{ATTENTION}[qkv]_proj\.weight",
        "row": ATTENTION + r"o_proj\.weight",
        "skip": r"model\.embed_tokens\.weight",
    },
}
FAMILIES = list(EXPECTED)


def plan_of(model, tp_size: int = 2) -> PartitionPlan:
    return plan_from_model(model, [site.name for site in find_experts(model)], tp_size)


def cuts(model, plan: PartitionPlan) -> dict[str, str]:
    """Parameter name -> what AutoTP will do to it, by its first matching rule."""
    parsed = AutoTPConfig.from_dict(plan.as_partition_config())
    found = {}
    for name, _ in model.named_parameters():
        spec = parsed.find_matching_spec(name)
        if spec is not None:
            found[name] = spec.partition_type.value + ", gathered" * spec.gather_output
    return found


def with_plan(monkeypatch, plan: dict | None, **overrides):
    """A tiny Mixtral whose only plan is ``plan``: transformers keeps it in the config, the class and the instance."""
    model = make_model("mixtral", **overrides)
    monkeypatch.setattr(type(model), "_tp_plan", None)
    model._tp_plan = None
    model.config.base_model_tp_plan = plan
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_each_parameter_is_cut_as_the_architecture_asks(family):
    model = make_model(family)
    expected = {
        name: kind
        for name, _ in model.named_parameters()
        for kind, pattern in EXPECTED[family].items()
        if re.fullmatch(pattern, name)
    }
    assert set(expected.values()) == set(EXPECTED[family])
    assert cuts(model, plan_of(model)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_routers_are_under_no_rule(family):
    model = make_model(family)
    sites, cut = find_experts(model), cuts(model, plan_of(model))
    mine = [f"{site.name}.{name}" for site in sites for name, _ in site.module.named_parameters()]
    routers = [name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(mine) == 2 * len(sites) and len(routers) == len(sites)
    assert not cut.keys() & {*mine, *routers}


@pytest.mark.parametrize(
    "family, pattern",
    [("mixtral", None), ("qwen3_moe", ATTENTION + r"[qk]_norm\.weight"), ("deepseek_v3", None), ("olmoe", None)],
)
def test_norms_on_sharded_heads_have_partial_gradients(family, pattern):
    """olmoe gathers its heads before q_norm and k_norm: every lane then sees all of them."""
    model = make_model(family)
    plan, names = plan_of(model), [name for name, _ in model.named_parameters()]
    expected = [name for name in names if pattern and re.fullmatch(pattern, name)]
    assert [name for name in names if plan.is_partial(name)] == expected
    assert len(expected) == (4 if pattern else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_modules_that_split_a_replicated_input_join_the_heads(family):
    plan = plan_of(make_model(family))
    assert set(plan.head_patterns) == {"lm_head", "embed_out"} | ({"o_proj"} if family == "olmoe" else set())
    assert AutoTPConfig.from_dict(plan.as_partition_config()).lm_head_patterns == plan.head_patterns


def test_stock_rules_are_not_mixed_in():
    assert AutoTPConfig.from_dict(plan_of(make_model("mixtral")).as_partition_config()).use_default_specs is False


def test_default_plans_share_nothing():
    first = PartitionPlan()
    first.head_patterns.append("o_proj")
    first.layer_specs.append({})
    assert PartitionPlan() == PartitionPlan(layer_specs=[], partial_patterns=[], head_patterns=["lm_head", "embed_out"])


def test_packed_projections_are_cut_in_halves(monkeypatch):
    model = with_plan(monkeypatch, {"layers.*.self_attn.q_proj": "packed_colwise"})
    (spec,) = AutoTPConfig.from_dict(plan_of(model).as_partition_config()).layer_specs
    assert (spec.partition_type.value, spec.gather_output) == ("column", False)
    assert (spec.shape, spec.get_partition_dim(), spec.get_num_sub_params()) == ((2, -1), 0, 2)


@pytest.mark.parametrize("style", ["colwise", "COLWISE"])
def test_styles_are_read_in_any_case(monkeypatch, style):
    model = with_plan(monkeypatch, {"layers.*.self_attn.q_proj": style})
    assert set(cuts(model, plan_of(model)).values()) == {"column"}


Q_PROJ, K_PROJ, O_PROJ = "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj"
SHARED_GATE = "mlp.shared_experts.gate_proj"


@pytest.mark.parametrize(
    "family, overrides, tp, layer, module, words",
    [
        ("mixtral", {}, 3, 0, Q_PROJ, ["num_attention_heads", "4 / 3"]),
        ("qwen3_moe", {}, 8, 0, Q_PROJ, ["num_attention_heads", "4 / 8"]),
        ("mixtral", {"num_key_value_heads": 2}, 4, 0, K_PROJ, ["num_key_value_heads", "2 / 4"]),
        ("deepseek_v3", {"moe_intermediate_size": 30}, 4, 1, SHARED_GATE, ["output size", "30 / 4"]),
    ],
)
def test_sizes_that_tp_does_not_divide(family, overrides, tp, layer, module, words):
    with pytest.raises(ModelError) as caught:
        plan_of(make_model(family, **overrides), tp)
    for word in [f"'model.layers.{layer}.{module}'", f"tensor_parallel.autotp_size={tp}", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "plan, tp, words",
    [
        ({f"layers.*.{O_PROJ}": "rowwise", f"layers.*.{Q_PROJ}": "colwise"}, 3, [f"'model.layers.0.{O_PROJ}'", "input size", "32 / 3"]),
        ({f"layers.*.{O_PROJ}": "rowwise_split_input"}, 3, [f"'model.layers.0.{O_PROJ}'", "input size", "32 / 3"]),
        ({f"layers.*.{O_PROJ}": "packed_colwise"}, 32, [f"'model.layers.0.{O_PROJ}'", "half", "16 / 32"]),
        ({"layers.*.input_layernorm": "colwise"}, 2, ["'model.layers.0.input_layernorm'", "two-dimensional"]),
        ({"layers.*.self_attn": "rowwise"}, 2, ["'model.layers.0.self_attn'", "two-dimensional"]),
        (
            {f"layers.*.{Q_PROJ}": "spiral"},
            2,
            [f"'model.layers.0.{Q_PROJ}'", "'spiral'", "colwise", "partition_config"],
        ),
        ({"norm": "sequence_parallel"}, 2, ["'model.norm'", "'sequence_parallel'", "rowwise"]),
    ],
)
def test_plans_that_cannot_be_followed_name_the_module(monkeypatch, plan, tp, words):
    with pytest.raises(ModelError) as caught:
        plan_of(with_plan(monkeypatch, plan), tp)
    for word in words:
        assert word in str(caught.value)


def test_gathered_outputs_may_be_uneven(monkeypatch):
    """AutoTP pads uneven shards when it gathers them; heads are whole again before they are used."""
    plan = dict.fromkeys(["lm_head", f"layers.*.{Q_PROJ}"], "colwise_gather_output")
    model = with_plan(monkeypatch, plan, vocab_size=65)
    assert set(cuts(model, plan_of(model, 3)).values()) == {"column, gathered"}


def test_a_row_parallel_layer_without_column_parallel_ones_beside_it_stays_whole(monkeypatch):
    """A pattern that means one kind of attention may match another whose projections the plan leaves whole."""
    plan = {f"layers.*.{O_PROJ}": "rowwise", f"layers.0.{Q_PROJ}": "colwise"}
    model = with_plan(monkeypatch, plan)
    assert cuts(model, plan_of(model)) == {
        f"model.layers.0.{Q_PROJ}.weight": "column",
        f"model.layers.0.{O_PROJ}.weight": "row",
        f"model.layers.1.{O_PROJ}.weight": "skip",
    }


def test_blocks_that_share_their_weights_stay_whole(monkeypatch):
    plan = {f"layers.*.{O_PROJ}": "rowwise", f"layers.*.{Q_PROJ}": "colwise"}
    model = with_plan(monkeypatch, plan)
    first, second = (layer.self_attn for layer in model.model.layers)
    assert set(cuts(model, plan_of(model)).values()) == {"row", "column"}
    second.k_proj.weight = first.k_proj.weight  # not cut by this plan
    assert set(cuts(model, plan_of(model)).values()) == {"row", "column"}
    second.q_proj.weight = first.q_proj.weight
    assert set(cuts(model, plan_of(model)).values()) == {"skip"}


@pytest.mark.parametrize("style", [None, "replicated_with_grad_allreduce"])
def test_norms_of_single_heads_are_partial_behind_sharded_projections(monkeypatch, style):
    """Some plans forget them."""
    model = make_model("qwen3_moe")
    plan = {f"layers.*.{name}": cut for name, cut in ((O_PROJ, "rowwise"), (Q_PROJ, "colwise"))}
    if style is not None:
        plan["layers.*.self_attn.q_norm"] = style
    monkeypatch.setattr("deepspeed_autoep.compat.hf_tp_plan", lambda _: {f"model.{key}": value for key, value in plan.items()})
    found = plan_of(model)
    partial = {name for name, _ in model.named_parameters() if found.is_partial(name)}
    # k_proj is whole here, and so is its norm's gradient.
    assert partial == {f"model.layers.{layer}.self_attn.q_norm.weight" for layer in (0, 1)}


def test_entries_that_match_no_module_are_left_out(monkeypatch):
    model = with_plan(monkeypatch, {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.nowhere": "spiral"})
    assert len(plan_of(model).layer_specs) == 1


@pytest.mark.parametrize("plan", [None, {}])
def test_a_model_without_a_plan(monkeypatch, plan):
    with pytest.raises(ModelError) as caught:
        plan_of(with_plan(monkeypatch, plan), 2)
    for word in ("MixtralForCausalLM has no tp_plan", "autotp_size=2", "partition_config", "autotp_size to 1"):
        assert word in str(caught.value)


OWN_SPECS = [
    {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
]


def own_block(specs: list[dict], **more) -> dict:
    return {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs, **more}}


def test_the_users_own_partition_config_wins():
    model = make_model("qwen3_moe")
    plan = make_plan(model, [site.name for site in find_experts(model)], own_block(OWN_SPECS), 2)
    found, expected = cuts(model, plan), EXPECTED["qwen3_moe"]
    assert {name for name, kind in found.items() if kind == "column"} == {
        name for name, _ in model.named_parameters() if re.fullmatch(expected["column"], name)
    }
    assert "lm_head.weight" not in found  # model's plan has it, the user's has not


def test_the_users_grad_allreduce_becomes_a_partial_gradient():
    model = make_model("qwen3_moe")
    plan = make_plan(model, [], own_block(OWN_SPECS), 2)
    partial = [name for name, _ in model.named_parameters() if plan.is_partial(name)]
    assert len(partial) == 4 and all(re.fullmatch(ATTENTION + r"[qk]_norm\.weight", name) for name in partial)
    assert not any(spec.grad_allreduce for spec in AutoTPConfig.from_dict(plan.as_partition_config()).layer_specs)


def test_the_users_spec_keeps_its_other_fields():
    spec = {
        "patterns": [r".*\.qkv\.weight$"],
        "partition_type": "column",
        "shape": [[4, 2, 2], -1],
        "partition_dim": 0,
        "model_types": ["mixtral"],
        "gather_output": True,
    }
    plan = make_plan(make_model("mixtral"), [], own_block([spec], lm_head_patterns=["score"]), 2)
    read = AutoTPConfig.from_dict(plan.as_partition_config())
    assert read.layer_specs == AutoTPConfig.from_dict(own_block([spec])["partition_config"]).layer_specs
    assert read.lm_head_patterns == ["score"]


def test_a_preset_wins_over_the_models_plan():
    model = make_model("mixtral")
    found = cuts(model, make_plan(model, [], {"autotp_size": 2, "preset_model": "llama"}, 2))
    columns = dict.fromkeys(["q_proj", "k_proj", "v_proj"], "column")
    assert {name.split(".")[-2]: kind for name, kind in found.items()} == columns | {"o_proj": "row"}


@pytest.mark.parametrize("block", [{}, {"autotp_size": 2}, {"autotp_size": 2, "partition_config": None}])
def test_without_an_own_plan_the_models_is_used(block):
    model = make_model("mixtral")
    names = [site.name for site in find_experts(model)]
    assert make_plan(model, names, block, 2) == plan_from_model(model, names, 2)


@pytest.mark.parametrize(
    "overrides, tp, words", [({}, 3, ["4 / 3"]), ({"num_key_value_heads": 2}, 4, ["num_key_value_heads", "2 / 4"])]
)
def test_heads_must_divide_in_the_users_own_plan_too(overrides, tp, words):
    with pytest.raises(ModelError) as caught:
        make_plan(make_model("mixtral", **overrides), [], own_block(OWN_SPECS), tp)
    for word in ["model.layers.0.self_attn.", f"tensor_parallel.autotp_size={tp}", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "specs",
    [
        [{"patterns": [r".*\.self_attn\."], "partition_type": "skip"}, *OWN_SPECS],
        [{**OWN_SPECS[0], "model_types": ["llama"]}],
    ],
    ids=["skipped-first", "other-model"],
)
def test_heads_that_the_users_plan_leaves_whole_are_not_checked(specs):
    model = make_model("mixtral")
    assert make_plan(model, [], own_block(specs), 3).layer_specs


@pytest.mark.parametrize(
    "block, words",
    [
        ({"preset_model": "mistral_large"}, ["tensor_parallel.preset_model='mistral_large'", "llama"]),
        (own_block([{**OWN_SPECS[0], "partition_type": "columns"}]), ["tensor_parallel.partition_config", "columns"]),
    ],
    ids=["preset", "partition_type"],
)
def test_a_plan_that_deepspeed_does_not_know_names_the_key(block, words):
    model = make_model("mixtral")
    with pytest.raises(AutoEPError) as caught:
        make_plan(model, [site.name for site in find_experts(model)], block, 2)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "pattern, suffix, name, matches",
    [
        ("layers.*.self_attn.q_proj", "", "model.layers.0.self_attn.q_proj", True),
        ("layers.*.self_attn.q_proj", "", "layers.12.self_attn.q_proj", True),
        ("layers.*.self_attn.q_proj", "", "model.language_model.layers.3.self_attn.q_proj", True),
        ("layers.*.self_attn.q_proj", "", "model.layers.0.1.self_attn.q_proj", False),  # the number holds no dot
        ("layers.*.self_attn.q_proj", "", "model.layers.x.self_attn.q_proj", False),
        ("layers.*.self_attn.q_proj", "", "model.layers..self_attn.q_proj", False),
        ("layers.*.self_attn.q_proj", "", "model.sublayers.0.self_attn.q_proj", False),
        ("layers.*.self_attn.q_proj", "", "model.layers.0.self_attn.q_proj_extra", False),
        ("layers.*.self_attn.q_proj", "", "model.layers.0.self_attnXq_proj", False),  # a dot is a dot
        ("layers.*.mlp.gate_proj", "", "model.layers.0.mlp.shared_experts.gate_proj", False),
        ("layers.*.mlp.experts.*.w1", "", "model.layers.0.mlp.experts.7.w1", True),
        ("lm_head", "", "lm_head", True),
        ("lm_head", "", "model.lm_head", True),
        ("lm_head", "", "my_lm_head", False),
        ("a+b", "", "a+b", True),
        ("a+b", "", "aab", False),
        ("lm_head", r"\.weight", "lm_head.weight", True),
        ("lm_head", r"\.weight", "lm_head.bias", False),
        ("lm_head", r"\.weight", "lm_head", False),
    ],
)
def test_plan_patterns_as_regular_expressions(pattern, suffix, name, matches):
    assert bool(re.match(plan_regex(pattern, suffix), name)) is matches


def layers(**widths: tuple[int, ...]) -> dict[str, AutoTPCut]:
    return {f"a.{name}.weight": AutoTPCut((sum(cut), 8), (sum(cut), 8), 0, (cut,)) for name, cut in widths.items()}


def test_lanes_hold_the_same_share_of_each_layer_of_a_block():
    """Uneven shares are exact where they are of the same heads."""
    check_shares(layers(q=(4, 4), k=(2, 2)), 2)
    check_shares(layers(q=(32, 32, 16, 16), k=(48, 48, 24, 24)), 4)
    check_shares({**layers(q=(32, 16)), "b.q.weight": layers(q=(16, 16))["a.q.weight"]}, 2)
    with pytest.raises(ModelError, match=r"'a.q' would be cut into \[16, 16\] and 'a.k' into \[32, 16\]"):
        check_shares(layers(q=(16, 16), k=(32, 16)), 2)
    with pytest.raises(ModelError, match=r"'a.q' would be cut into \[16, 16, 0\], nothing for rank 2"):
        check_shares(layers(q=(16, 16, 0)), 3)
