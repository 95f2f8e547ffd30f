"""Stock AutoEP's names and layouts of experts, and the model's. Pure: no process, no checkpoint."""

from pathlib import Path

import pytest
import torch

from deepspeed_autoep.checkpoint.stock.names import ExpertLayer, NameMap, expert_layers
from deepspeed_autoep.checkpoint.stock.sources import Flat, Joined
from deepspeed_autoep.checkpoint.stock.table import MASTER, StockGroup, StockTensor, logical_groups, logical_tensors
from deepspeed_autoep.errors import CheckpointError

BLOCK = "model.layers.0.mlp"
LAYER = ExpertLayer(0, BLOCK, 4, 2)
PATH = Path("mp_rank_00_model_states.pt")


def name_map(names=(), **block) -> NameMap:
    return NameMap([LAYER], {"expert_parallel": block}, [f"{BLOCK}.{name}" for name in names], PATH)


@pytest.mark.parametrize("preset", [None, "mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"])
def test_router_and_experts_of_every_preset(preset):
    names = name_map(**({"preset_model": preset} if preset else {}))
    assert names.logical(f"{BLOCK}.router.gate.weight") == f"{BLOCK}.gate.weight"
    assert names.logical(f"{BLOCK}.router.gate.bias") == f"{BLOCK}.gate.bias"
    assert names.logical(f"{BLOCK}.router.e_score_correction_bias") == f"{BLOCK}.gate.e_score_correction_bias"
    assert names.logical(f"{BLOCK}.gate.gate.weight") is None
    assert names.logical("model.layers.1.mlp.router.gate.weight") == "model.layers.1.mlp.router.gate.weight"  # no block of stock's
    assert [names.stack(LAYER, part) for part in ("w1", "w2")] == [f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"]
    assert names.fused


@pytest.mark.parametrize(
    "block, held, shared, gate",
    [
        ({}, ["shared_experts_gate.weight"], "shared_expert", "shared_expert_gate"),
        ({}, ["shared_experts.up_proj.weight"], "shared_experts", None),
        ({"preset_model": "qwen3_moe"}, [], "shared_expert", "shared_expert_gate"),
        ({"preset_model": "deepseek_v3"}, [], "shared_experts", None),
        ({"preset_model": "deepseek_v3", "shared_experts_pattern": "common"}, [], "common", None),
    ],
)
def test_shared_experts(block, held, shared, gate):
    names = name_map(held, **block)
    assert names.logical(f"{BLOCK}.shared_experts.up_proj.weight") == f"{BLOCK}.{shared}.up_proj.weight"
    if gate:
        assert names.logical(f"{BLOCK}.shared_experts_gate.weight") == f"{BLOCK}.{gate}.weight"


def test_names_of_the_users_own():
    names = name_map(router_pattern="chooser", expert_pattern="bank", expert_w1="a", expert_w2="b", expert_w3="c")
    assert names.logical(f"{BLOCK}.router.gate.weight") == f"{BLOCK}.chooser.weight"
    assert [names.stack(LAYER, part) for part in ("w1", "w2", "w3")] == [f"{BLOCK}.bank.{name}" for name in "abc"]
    assert not names.fused
    assert name_map(expert_w3=None).fused
    with pytest.raises(CheckpointError, match="surprise"):
        names.logical(f"{BLOCK}.surprise")


def stacks(dtype=torch.float32, **shapes) -> list[StockTensor]:
    shapes = {"w1": (4, 3, 5), "w2": (4, 5, 3), "w3": (4, 3, 5), **shapes}
    return [StockTensor(f"{BLOCK}.experts.{part}", {MASTER: Flat(shape, dtype, ())}, True, 2.0) for part, shape in shapes.items()]


def test_gate_and_up_are_one_stack_again():
    both, down = logical_tensors(stacks(), name_map(), None, PATH)
    assert (both.name, both.shape, down.shape) == (f"{BLOCK}.experts.gate_up_proj", (4, 6, 5), (4, 5, 3))
    assert isinstance(both.states[MASTER], Joined) and both.states[MASTER].dim == 1
    assert [tensor.name.rsplit(".", 1)[1] for tensor in logical_tensors(stacks(), name_map(expert_w1="a", expert_w2="b", expert_w3="c"), None, PATH)] == ["a", "c", "b"]


@pytest.mark.parametrize("turned", [False, True])
def test_the_models_own_shapes_say_whether_stacks_were_turned(turned):
    like = {f"{BLOCK}.experts.gate_up_proj": (4, 5, 6) if turned else (4, 6, 5), f"{BLOCK}.experts.down_proj": (4, 3, 5) if turned else (4, 5, 3)}
    assert {tensor.name: tensor.shape for tensor in logical_tensors(stacks(), name_map(), like, PATH)} == like


def test_a_stack_of_equal_sides_is_never_turned():
    """H = 2 I: stock takes it for [E, 2 I, H] by the other stack's shape."""
    sizes = {"w1": (4, 3, 6), "w2": (4, 6, 3), "w3": (4, 3, 6)}
    both, down = f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"
    for like in ({both: (4, 6, 6), down: (4, 6, 3)}, {both: (4, 6, 6), down: (4, 3, 6)}):
        assert {tensor.name: tensor.shape for tensor in logical_tensors(stacks(**sizes), name_map(), like, PATH)} == like


@pytest.mark.parametrize(
    "tensors, text",
    [
        (stacks()[:2], "w3"),
        (stacks(w3=(4, 3, 6)), "w3"),
        (stacks(w1=(3, 3, 5)), r"\[3, 3, 5\]"),
        ([*stacks()[:2], StockTensor(f"{BLOCK}.experts.w3", stacks()[2].states, True, 1.0)], "steps 2.0 and 1.0"),
        ([*stacks()[:2], *stacks(torch.bfloat16)[2:]], "bfloat16"),
        ([*stacks(), StockTensor(f"{BLOCK}.experts.gate_up_proj", {}, True)], "does not use"),
    ],
)
def test_parts_that_do_not_fit(tensors, text):
    with pytest.raises(CheckpointError, match=text):
        logical_tensors(tensors, name_map(), None, PATH)


def test_groups_have_the_models_names():
    names = name_map()
    dense, experts = StockGroup((f"{BLOCK}.router.gate.weight", "w"), {"lr": 1}), StockGroup(LAYER.stacks(), {"lr": 2}, True)
    assert [group.names for group in logical_groups([dense, experts], names, PATH)] == [
        (f"{BLOCK}.gate.weight", "w"),
        (f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj"),
    ]
    split = [StockGroup(LAYER.stacks()[:2], {"lr": 2}, True), StockGroup(LAYER.stacks()[2:], {"lr": 3}, True)]
    with pytest.raises(CheckpointError, match="different options"):
        logical_groups(split, names, PATH)


def entry(**changes) -> dict:
    return {"moe_layer_id": 0, "module_path": BLOCK, "num_experts": 4, "num_local_experts": 2, "ep_size": 2, "expert_key_prefix": f"{BLOCK}.experts", **changes}


def test_metadata():
    assert expert_layers({"ds_autoep_layers": [entry()]}, PATH) == expert_layers({"autoep_layers": [entry()]}, PATH) == (LAYER,)
    assert expert_layers({"ds_autoep_layers": None}, PATH) == ()
    for changes, text in (({"num_local_experts": 3}, "equal blocks"), ({"expert_key_prefix": "experts"}, "'experts'")):
        with pytest.raises(CheckpointError, match=text):
            expert_layers({"ds_autoep_layers": [entry(**changes)]}, PATH)
    with pytest.raises(CheckpointError, match="damaged"):
        expert_layers({"ds_autoep_layers": [{}]}, PATH)
