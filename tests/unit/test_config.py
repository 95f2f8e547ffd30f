"""The two blocks of the configuration: what is accepted, what is noted, and what is refused with which words."""

from __future__ import annotations

import inspect
import re

import pytest

from deepspeed_autoep.config import (
    IGNORED_KEYS,
    TENSOR_KEYS,
    ExpertParallelConfig,
    check_batch,
    check_supported,
    parse_folding_config,
)
from deepspeed_autoep.errors import AutoEPError, ConfigError, UnsupportedError

# Every expert_parallel key of DeepSpeed 0.19.8 with a value that a user could have written, away from its default
# where our code allows one.
WITH_EFFECT = {
    "enabled": True,
    "autoep_size": 4,
    "expert_tensor_parallel_size": 1,
    "validate_folding_routing": True,
    "use_grouped_mm": False,
}
WITHOUT_EFFECT = {
    "async_split_plan": True,
    "preset_model": "mixtral",
    "moe_layer_pattern": r"model\.layers\.\d+\.mlp",
    "expert_pattern": "experts",
    "router_pattern": "gate",
    "disable_triton_grouped_mm": True,
    "route_norm": True,
    "route_scale": 2.5,
    "score_apply": "post",
    "combine_impl": "weighted_sum",
    "row_weighting_impl": "eager",
    "gate_up_impl": "fused",
    "comm_backend": "deepep",
    "comm_num_sm": 24,
    "comm_qp_margin": 2,
    "comm_max_tokens_per_rank": 4096,
    "num_expert_groups": 8,
    "num_limited_groups": 4,
    "score_func": "sigmoid",
    "top_k": 2,
    "routed_scaling_factor": 2.5,
    "expert_w1": "gate_proj",
    "expert_w2": "down_proj",
    "expert_w3": "up_proj",
    "num_experts_attr": "num_local_experts",
    "top_k_attr": "num_experts_per_tok",
    "has_shared_experts": True,
    "shared_experts_pattern": "shared_experts",
    "shared_experts_gate_pattern": "shared_expert_gate",
    "expert_activation": "silu",
}
ONLY_NULL = {"load_balance_coeff": None}
OWN_KEYS = {
    "async_checkpoint",
    "verify_checkpoint",
    "initial_weights",
    "expert_backend",
    "replicated_gradient_sync",
    "replicated_gradient_verify_interval",
    "tp_gradient_correction",
    "parameter_norm",
}


def stock_expert_keys() -> set[str]:
    """The keys that DeepSpeed reads, from the text of its parser."""
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config

    source = inspect.getsource(parse_autoep_config)
    return set(re.findall(r'param_dict\.get\("(\w+)"', source)) | set(re.findall(r'"(\w+)" in param_dict', source))


def parse(expert: dict | None = None, tensor: dict | None = None, **more):
    config = {"expert_parallel": {"enabled": True, **(expert or {})}, **more}
    return parse_folding_config(config if tensor is None else config | {"tensor_parallel": tensor})


def blocks_with(block: str, key: str, value) -> dict:
    blocks = {"expert_parallel": {"enabled": True}, "tensor_parallel": {}}
    blocks[block][key] = value
    return blocks


def message_of(error: type[Exception], function, *arguments, **options) -> str:
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


def test_stock_keys_are_the_ones_tried_here():
    assert stock_expert_keys() == {*WITH_EFFECT, *WITHOUT_EFFECT, *ONLY_NULL}


def test_legal_keys_are_stocks_and_our_own():
    assert {*ExpertParallelConfig.model_fields, *IGNORED_KEYS} == {*WITH_EFFECT, *WITHOUT_EFFECT, *ONLY_NULL} | OWN_KEYS


def test_tensor_keys_are_stocks():
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    fields = TPTrainingConfig.model_fields
    assert set(TENSOR_KEYS) == set(fields) | {field.alias for field in fields.values() if field.alias}


@pytest.mark.parametrize("key, value", WITH_EFFECT.items())
def test_key_with_effect_is_kept_without_a_note(key, value):
    folding = parse({key: value})
    assert getattr(folding.expert, key) == value
    assert folding.notes == ()


@pytest.mark.parametrize("key, value", WITHOUT_EFFECT.items())
def test_key_without_effect_is_accepted_and_noted_with_the_reason(key, value):
    folding = parse({key: value})
    (note,) = folding.notes
    found = re.fullmatch(rf"expert_parallel\.{key} has no effect: (.+)", note)
    assert found and len(found[1].split()) >= 4
    assert folding.expert == parse().expert


@pytest.mark.parametrize(
    "keys, word",
    [
        (["comm_backend", "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank"], "all-to-all"),
        (["route_norm", "route_scale", "score_func", "top_k", "num_expert_groups", "router_pattern"], "own router"),
        (["has_shared_experts", "shared_experts_pattern"], "tensor_parallel"),
        (["preset_model", "expert_w1", "moe_layer_pattern"], "own experts module"),
    ],
)
def test_the_reason_fits_the_key(keys, word):
    notes = parse({key: WITHOUT_EFFECT[key] for key in keys}).notes
    assert len(notes) == len(keys) and all(word in note for note in notes)


@pytest.mark.parametrize("key", [*WITHOUT_EFFECT, *ONLY_NULL])
def test_null_asks_for_nothing(key):
    assert parse({key: None}).notes == ()


def test_load_balance_coefficient_is_refused_with_a_way_out():
    text = message_of(ConfigError, parse, {"load_balance_coeff": 0.01})
    for word in ("expert_parallel.load_balance_coeff=0.01", "null", "router_aux_loss_coef"):
        assert word in text


@pytest.mark.parametrize(
    "config", [{}, {"expert_parallel": {}}, {"expert_parallel": {"enabled": False, "autoep_size": 8}}]
)
@pytest.mark.parametrize("tensor", [{}, {"tensor_parallel": {"autotp_size": 2}}])
def test_without_expert_parallelism_there_is_nothing_to_fold(config, tensor):
    assert parse_folding_config(config | tensor) is None


@pytest.mark.parametrize(
    "tensor, tp_size", [(None, 1), ({}, 1), ({"autotp_size": 0}, 1), ({"autotp_size": 1}, 1), ({"autotp_size": 4}, 4)]
)
def test_tp_size(tensor, tp_size):
    assert parse(tensor=tensor).tp_size == tp_size


@pytest.mark.parametrize(
    "expert, backend",
    [
        ({}, "auto"),
        ({"use_grouped_mm": False}, "loop"),
        ({"expert_backend": "grouped_mm"}, "grouped_mm"),
        ({"expert_backend": "model", "use_grouped_mm": False}, "model"),
        ({"expert_backend": "loop"}, "loop"),
    ],
)
def test_expert_backend(expert, backend):
    assert parse(expert).expert_backend == backend


def one_letter_less(key: str) -> list[str]:
    return sorted({key[:cut] + key[cut + 1 :] for cut in range(1, len(key))} - {key})


LEGAL = {
    "expert_parallel": {*WITH_EFFECT, *WITHOUT_EFFECT, *ONLY_NULL, *OWN_KEYS},
    "tensor_parallel": set(TENSOR_KEYS),
}
# expert_w is as near to three keys; two letters are near to nothing.
MISSPELT = [
    (block, key)
    for block, keys in LEGAL.items()
    for key in sorted(keys)
    if len(key) > 3 and not key.startswith("expert_w")
]


@pytest.mark.parametrize("block, key", MISSPELT)
def test_a_missing_letter_is_an_error_that_names_the_key(block, key):
    for wrong in one_letter_less(key):
        text = message_of(ConfigError, parse_folding_config, blocks_with(block, wrong, 1))
        assert f"'{block}.{wrong}'" in text and f"did you mean '{block}.{key}'" in text


@pytest.mark.parametrize("block", LEGAL)
def test_a_key_near_to_none_lists_the_legal_ones(block):
    text = message_of(ConfigError, parse_folding_config, blocks_with(block, "zzzz", 1))
    assert f"'{block}.zzzz'" in text
    assert all(re.search(rf"\b{key}\b", text) for key in LEGAL[block])


def test_a_misspelt_key_is_an_error_in_a_disabled_block_too():
    text = message_of(ConfigError, parse_folding_config, {"expert_parallel": {"enable": True, "autoep_size": 4}})
    assert "'expert_parallel.enable'" in text and "'expert_parallel.enabled'" in text


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("expert_paralel", "expert_parallel"),
        ("experts_parallel", "expert_parallel"),
        ("expert_parallell", "expert_parallel"),
        ("Expert_Parallel", "expert_parallel"),
        ("tensor_paralell", "tensor_parallel"),
        ("tensor_parallelism", "tensor_parallel"),
        ("tensorparallel", "tensor_parallel"),
    ],
)
def test_misspelt_block_names(wrong, right):
    text = message_of(ConfigError, parse_folding_config, {wrong: {"enabled": True}})
    assert f"'{wrong}'" in text and f"did you mean '{right}'" in text


def test_other_blocks_of_deepspeed_are_not_taken_for_misspellings():
    names = ["pipeline", "sequence_parallel_size", "use_data_before_expert_parallel_", "data_parallel", "tensorboard"]
    assert parse(**{name: {} for name in names}) == parse()


@pytest.mark.parametrize(
    "block, key, value",
    [
        *(("expert_parallel", "autoep_size", value) for value in (0, -1, True, 2.0, "2", None)),
        *(("expert_parallel", "expert_tensor_parallel_size", value) for value in (0, -1, False, 1.0, "1")),
        *(("expert_parallel", "enabled", value) for value in (1, "true", None)),
        *(("expert_parallel", "validate_folding_routing", value) for value in (1, "yes")),
        *(("expert_parallel", "use_grouped_mm", value) for value in (0, "no")),
        *(("expert_parallel", "expert_backend", value) for value in ("fast", None)),
        *(("expert_parallel", "replicated_gradient_sync", value) for value in ("mean", True, None)),
        *(("expert_parallel", "replicated_gradient_verify_interval", value) for value in (0, 1.5, "10", True)),
        *(("expert_parallel", "tp_gradient_correction", value) for value in ("flush", None)),
        *(("expert_parallel", "parameter_norm", value) for value in (1, "yes")),
        *(("tensor_parallel", "autotp_size", value) for value in (-1, True, 2.0, "2", None)),
        ("tensor_parallel", "partition_config", [1]),
        ("tensor_parallel", "preset_model", 3),
    ],
)
def test_wrong_types_and_ranges_name_key_and_value(block, key, value):
    text = message_of(ConfigError, parse_folding_config, blocks_with(block, key, value))
    assert f"{block}.{key}={value!r}: " in text


@pytest.mark.parametrize("block", LEGAL)
@pytest.mark.parametrize("value", [True, 2, [1], "on"], ids=repr)
def test_a_block_must_be_an_object(block, value):
    text = message_of(ConfigError, parse_folding_config, {"expert_parallel": {"enabled": True}} | {block: value})
    assert block in text and repr(value) in text


def test_vocabulary_parallel_head_is_refused():
    text = message_of(UnsupportedError, parse, tensor={"autotp_size": 2, "vocab_parallel_lm_head": True})
    assert "tensor_parallel.vocab_parallel_lm_head=true" in text and "remove it" in text
    assert parse(tensor={"autotp_size": 2, "vocab_parallel_lm_head": False}).tp_size == 2


ZERO = "zero_optimization"
# (path of keys, value) -> part of the way out
REFUSED = [
    (f"{ZERO}.stage", 3, "stage 0, 1 or 2"),
    (f"{ZERO}.offload_optimizer.device", "cpu", "remove"),
    (f"{ZERO}.offload_param.device", "nvme", "remove"),
    (f"{ZERO}.cpu_offload", True, "remove"),
    (f"{ZERO}.zenflow", {"topk_ratio": 0.1}, "remove"),
    (f"{ZERO}.zero_quantized_gradients", True, "remove"),
    (f"{ZERO}.zero_quantized_weights", True, "remove"),
    (f"{ZERO}.reduce_scatter", False, "set it to true"),
    ("sequence_parallel_size", 2, "tensor_parallel.autotp_size"),
    ("use_data_before_expert_parallel_", True, "set it to false"),
    ("compile.deepcompile", True, "set it to false"),
    ("checkpoint.use_node_local_storage", True, "set it to false"),
    ("datastates_ckpt", {"host_cache_size": 16}, "async_checkpoint"),
    ("sparse_gradients", True, "remove"),
    ("amp", {"enabled": True}, "bf16 or fp16"),
    ("torch_autocast", {"enabled": True}, "bf16 or fp16"),
    ("hybrid_engine", {"enabled": True}, "remove"),
    ("optimizer.type", "Lamb", "use AdamW"),
    ("optimizer.type", "Muon", "use AdamW"),
    ("optimizer.type", "Adafactor", "use AdamW"),
    ("optimizer.type", "OneBitAdam", "use AdamW"),
    ("optimizer.type", "OneBitLamb", "use AdamW"),
    ("optimizer.type", "ZeroOneAdam", "use AdamW"),
]


def nested(path: str, value) -> dict:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("path, value, way_out", REFUSED)
def test_refusals_name_key_value_and_way_out(path, value, way_out):
    text = message_of(UnsupportedError, check_supported, nested(path, value))
    named = f"{path}={value!r} "
    assert text.startswith(named) and way_out in text.removeprefix(named)


@pytest.mark.parametrize(
    "config",
    [
        {},
        *({"zero_optimization": {"stage": stage}} for stage in (0, 1, 2)),
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}, "offload_param": None}},
        {"zero_optimization": {"reduce_scatter": True, "cpu_offload": False, "zero_quantized_weights": False}},
        {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False}},
        {"sequence_parallel_size": 1, "use_data_before_expert_parallel_": False},
        {"compile": {"deepcompile": False}},
        {"amp": {"enabled": False}, "torch_autocast": {"enabled": False}, "hybrid_engine": {"enabled": False}},
        {"sparse_gradients": False, "bf16": {"enabled": True}, "fp16": {"enabled": False}},
        *({"optimizer": {"type": name, "params": {"lr": 1e-3}}} for name in ("AdamW", "Adam", "SGD", "Lion")),
    ],
)
def test_what_is_exact_is_not_refused(config):
    check_supported(config)


@pytest.mark.parametrize(
    "config", [{"hybrid_engine": {"max_out_tokens": 512}}, {"torch_autocast": {"dtype": "bfloat16"}}]
)
def test_blocks_that_are_off_by_default_are_not_refused(config):
    check_supported(config)


@pytest.mark.parametrize("path, value", [(f"{ZERO}.offload_optimizer", True), ("sequence_parallel_size", "2")])
def test_wrong_types_of_stock_keys_name_key_and_value(path, value):
    text = message_of(AutoEPError, check_supported, nested(path, value))
    assert path in text and repr(value) in text


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch(*sizes) -> dict:
    return {key: size for key, size in zip(BATCH_KEYS, sizes, strict=True) if size is not None}


@pytest.mark.parametrize(
    "sizes, tp, world",
    [
        ((16, 4, 1), 2, 8),
        ((32, 4, 2), 2, 8),
        ((4, 4, 1), 8, 8),
        ((32, 4, 1), 1, 8),
        ((8, None, 2), 2, 8),
        ((8, 2, None), 2, 8),
        ((8, None, None), 2, 8),
        ((None, 4, 2), 2, 8),
    ],
)
def test_batch_sizes_that_agree(sizes, tp, world):
    check_batch(batch(*sizes), tp, world)


@pytest.mark.parametrize("sizes", [(8, 0, 1), (8, -1, 1), (8, "auto", 1), (8, 2, 0), (True, 1, 1), (None, 1.5, 1)])
def test_batch_sizes_of_a_wrong_kind_name_key_and_value(sizes):
    bad = next((key, size) for key, size in batch(*sizes).items() if isinstance(size, bool) or not isinstance(size, int) or size < 1)
    text = message_of(ConfigError, check_batch, batch(*sizes), 2, 8)
    assert f"{bad[0]}={bad[1]!r}" in text


@pytest.mark.parametrize(
    "path, value",
    [("gradient_clipping", "0.5"), ("gradient_clipping", -1), ("bf16", [1]), ("optimizer", "AdamW"), ("zero_optimization.stage", True)],
)
def test_wrong_values_of_what_is_read_name_key_and_value(path, value):
    text = message_of(AutoEPError, check_supported, nested(path, value))
    assert path in text and repr(value) in text


def test_a_near_miss_at_the_top_level_is_an_error():
    text = message_of(ConfigError, parse_folding_config, {"gradient_cliping": 1.0, "expert_parallel": {"enabled": True}})
    assert "gradient_cliping" in text and "'gradient_clipping'" in text


def test_a_second_tp_size_must_agree():
    config = {"expert_parallel": {"enabled": True}, "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}
    assert "tp_size=4" in message_of(ConfigError, parse_folding_config, config)


def test_no_batch_size_at_all_is_an_error():
    assert "train_micro_batch_size_per_gpu" in message_of(ConfigError, check_batch, {}, 2, 8)


@pytest.mark.parametrize(
    "sizes, tp, world, product",
    [
        ((32, 4, 1), 2, 8, "4 * 1 * 4 = 16"),  # counts every rank as data parallel
        ((16, 4, 2), 2, 8, "4 * 2 * 4 = 32"),
        ((8, 4, 1), 8, 8, "4 * 1 * 1 = 4"),
        ((8, 4, 1), 1, 8, "4 * 1 * 8 = 32"),
        ((7, None, 2), 2, 8, "2 * 4 = 8"),
        ((7, 2, None), 2, 8, "2 * 4 = 8"),
        ((7, None, None), 2, 8, "dp = 4 = 4"),
    ],
)
def test_batch_sizes_that_disagree_show_the_product(sizes, tp, world, product):
    text = message_of(ConfigError, check_batch, batch(*sizes), tp, world)
    for word in (f"train_batch_size={sizes[0]}", product, f"{world} / {tp}", "tensor_parallel.autotp_size"):
        assert word in text


@pytest.mark.parametrize("sync", ["average", "off"])
def test_an_interval_without_verification_is_reported(sync):
    notes = parse({"replicated_gradient_sync": sync, "replicated_gradient_verify_interval": 5}).notes
    assert len(notes) == 1 and "replicated_gradient_verify_interval has no effect" in notes[0] and repr(sync) in notes[0]
    assert parse({"replicated_gradient_sync": "verify", "replicated_gradient_verify_interval": 5}).notes == ()
