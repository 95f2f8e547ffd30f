"""Where placements say that a rank's elements lie, they lie: every parameter of every family against the whole model's."""

import pytest
import torch

from deepspeed_autoep.checkpoint.slices import check_union
from tests.families.tiny import build as build_family
from tests.unit.lora import EXPERTS, Lora, make_lora_model
from tests.unit.models import make_model
from tests.unit.pool import run_on
from tests.unit.test_hf_families import DOZEN, EVERY
from tests.unit.training import Case, build_engine


def differing(engine, whole: dict[str, torch.Tensor]) -> tuple[list[str], dict]:
    """Names of what is not the slice of ``whole`` that its placement says; and each rank's boxes."""
    from deepspeed_autoep.engine.logical_tensors import logical_tensors
    from deepspeed_autoep.engine.master_state import master_state

    wrong, boxes = [], {}
    state = engine.module.state_dict()
    tensors = logical_tensors(engine, master_state(engine.optimizer))
    for tensor in tensors:
        local, right = state[tensor.name], whole[tensor.name]
        pairs = list(tensor.cut.boxes(tuple((0, size) for size in tensor.cut.local_shape)))
        same = tensor.cut.shape == tuple(right.shape) and all(
            torch.equal(local[tuple(slice(*side) for side in mine)], right[tuple(slice(*side) for side in logical)]) for mine, logical in pairs
        )
        if not same:
            wrong.append(tensor.name)
        if tensor.replica == 0:
            boxes[tensor.name] = (tensor.cut.shape, [logical for _, logical in pairs])
    named = {name for tensor in tensors for name in (tensor.name, *tensor.aliases)}
    engine.destroy()
    return wrong + sorted(set(whole) - named), boxes


def check_model(case: Case, build):
    model = build()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    return differing(build_engine(case, model), whole)


def check_family(name: str, tp: int):
    return check_model(Case(world=4, tp=tp, ep=2, etp=2, zero=0), lambda: build_family(name))


def check_lora(case: Case, lora: Lora):
    return check_model(case, lambda: make_lora_model(case, lora))


def check_results(results) -> None:
    """On no rank a difference; and those that are the first of their replicas make up every tensor."""
    unions: dict[str, tuple] = {}
    for rank, (wrong, boxes) in enumerate(results):
        assert wrong == []
        for name, (shape, own) in boxes.items():
            unions.setdefault(name, (shape, []))[1].extend((box, rank) for box in own)
    assert unions
    for name, (shape, pieces) in unions.items():
        check_union(name, shape, pieces)


def family_at(name: str) -> None:
    from tests.families.parity import has_tp_plan

    check_results(run_on(4, check_family, name, 2 if has_tp_plan(name) else 1))


@pytest.mark.parametrize("name", [name for name in DOZEN if name in EVERY])
def test_every_parameter_of_a_family(name):
    family_at(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in EVERY if name not in DOZEN])
def test_every_parameter_of_a_family_full(name):
    family_at(name)


LORA = [
    (Case("mixtral", 4, 2, 2, 0, etp=2), Lora(parameters=EXPERTS)),
    (Case("gpt_oss", 4, 4, 2, 0, etp=1), Lora(parameters=EXPERTS)),
    (Case("gpt_oss", 4, 1, 1, 0, etp=4), Lora(modules=(), parameters=EXPERTS)),
]


@pytest.mark.parametrize("case, lora", LORA, ids=str)
def test_lora(case, lora):
    check_results(run_on(case.world, check_lora, case, lora))


SPECS = {
    "uneven rows": {"patterns": [r".*lm_head\.weight$"], "partition_type": "column", "gather_output": True},
    "parts of rows": {"patterns": [r".*\.q_proj\.weight$"], "partition_type": "column", "shape": [[16, 8, 8], -1], "partition_dim": 0},
    "parts of each block of rows": {"patterns": [r".*\.q_proj\.weight$"], "partition_type": "column", "shape": [2, 16, 32], "partition_dim": 1},
    "halves with a bias": {"patterns": [r".*\.q_proj\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    "parts of columns": {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row", "shape": [-1, [16, 16]], "partition_dim": 1},
    "columns": {"patterns": [r".*\.o_proj\.weight$"], "partition_type": "row"},
}


def check_spec(case: Case):
    """A vocabulary that tp does not divide, biases in attention. What the cut computes is of no interest here."""
    return check_model(case, lambda: make_model("qwen3_moe", vocab_size=67, attention_bias=True))


@pytest.mark.parametrize("spec", SPECS)
def test_the_users_own_cuts(spec):
    config = {"use_default_specs": False, "layer_specs": [SPECS[spec]]}
    case = Case("qwen3_moe", 4, 4, 2, 0, config=(("tensor_parallel", {"autotp_size": 4, "partition_config": config}),))
    check_results(run_on(4, check_spec, case))
