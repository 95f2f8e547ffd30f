"""Every (tp, ep, etp) that exists on 1, 2, 4, 6 and 8 processes: who is reduced with whom, and parity with one process.

CI runs a spread in which every world, every tp, ep and etp, and every ZeRO stage occurs; ``make test-full`` runs all.
"""

import itertools
from dataclasses import replace

import pytest

from deepspeed_autoep.folding import GradientFamily
from deepspeed_autoep.moe import experts, layer
from tests.unit.pool import run_on
from tests.unit.test_gradients import powers_of_two
from tests.unit.test_parity import LOSS_AND_NORM, PARAMETER, check
from tests.unit.training import Case, reference_of, train, worst_errors

WORLDS = (1, 2, 4, 6, 8)
MODELS = ("mixtral", "gpt_oss")
# 24 attention heads, 24 experts and I = 48 divide by every size.
DIVISIBLE = (
    ("num_attention_heads", 24),
    ("num_key_value_heads", 24),
    ("head_dim", 4),
    ("num_local_experts", 24),
    ("vocab_size", 72),
)


def name(case: Case) -> str:
    return str(replace(case, overrides=()))


def foldings(world: int) -> list[tuple[int, int, int]]:
    sizes = range(1, world + 1)
    return [
        (tp, ep, etp) for tp, ep, etp in itertools.product(sizes, repeat=3) if world % tp == 0 and world % (ep * etp) == 0
    ]


def cases(model: str) -> list[Case]:
    made = []
    for world in WORLDS:
        for tp, ep, etp in foldings(world):
            samples = world // tp * (2 if world // tp < 4 else 1)
            made.append(Case(model, world, tp, ep, 0, samples=samples, length=7, steps=3, overrides=DIVISIBLE, etp=etp))
    return made


def spread(model: str, step: int, first: int = 0) -> set[Case]:
    """Every ``step``-th folding of the model, its ZeRO stage walking along."""
    return {replace(case, zero=index % 3) for index, case in enumerate(cases(model)) if index % step == first}


CI = [case for model, first in zip(MODELS, (0, 3), strict=True) for case in sorted(spread(model, 7, first), key=name)]
ALL = [replace(case, zero=zero) for model in MODELS for case in cases(model) for zero in (0, 1, 2)]


def test_the_spread_meets_every_size():
    assert len(CI) >= 20 and len(ALL) == 606
    for field in ("world", "tp", "ep", "etp", "zero"):
        assert {getattr(case, field) for case in CI} == {getattr(case, field) for case in ALL}, field
    kinds = {(case.etp > case.tp, case.tp % case.etp != 0 and case.etp % case.tp != 0, case.ep > 1) for case in CI if case.etp > 1}
    assert len(kinds) >= 4  # smaller and larger than tp, straddling, alone and with EP


@pytest.mark.parametrize("case", CI, ids=name)
def test_parity(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in ALL if case not in CI], ids=name)
def test_parity_full(case):
    check(case)


def check_powers(case: Case) -> None:
    case = replace(case, optimizer="SGD", samples=case.world // case.tp, clip=0.0)
    right = {"expert", "replicated"}
    if case.tp > 1:
        right.add("tp_sharded")
    if case.etp > 1 and case.family == "gpt_oss":  # whose down-projection bias all ETP peers hold whole
        right.add("expert_shared_etp")
    for wrong, families in run_on(case.world, powers_of_two, case):
        assert set(families) == right
        assert not wrong


@pytest.mark.parametrize("case", sorted(spread("gpt_oss", 5), key=name), ids=name)
def test_powers_of_two_show_who_was_reduced(case):
    check_powers(case)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=name)
def test_powers_of_two_show_who_was_reduced_full(case):
    check_powers(case)


VARIANTS = {
    "reentrant": {"options": (("checkpointing", "reentrant"),)},
    "nonreentrant": {"options": (("checkpointing", "nonreentrant"),)},
    "accumulation": {"config": (("gradient_accumulation_steps", 2),)},
    # AdamW divides by the size of a gradient, also of one that is rounding noise.
    "aux": {"aux": True, "optimizer": "SGD"},
    "uneven_tokens": {"length": 5},  # T = 5 with one sample a rank: not divisible by tp 2
    "loop": {"expert_config": (("expert_backend", "loop"),)},
    "model_forward": {"expert_config": (("expert_backend", "model"),)},
    "bucket": {"expert_config": (("tp_gradient_correction", "bucket"),)},
    "scattered": {"zero_config": (("contiguous_gradients", False),)},
    "overlap": {"zero_config": (("overlap_comm", True), ("reduce_bucket_size", 700))},
}
SIZES = {"within_tp": (4, 2, 1, 2), "across_data": (4, 1, 2, 2), "straddling": (6, 2, 1, 3)}


# (variant, sizes, model), in an order in which every third one meets every value.
TRIPLES = [
    (variant, sizes, model)
    for position, variant in enumerate(VARIANTS)
    for sizes in list(SIZES)[position % 3 :] + list(SIZES)[: position % 3]
    for model in (MODELS if position % 2 else MODELS[::-1])
]


def check_variant(variant: str, sizes: str, model: str) -> None:
    position = (list(VARIANTS).index(variant) + list(SIZES).index(sizes)) % 3
    world, tp, ep, etp = SIZES[sizes]
    zero = position if variant not in ("bucket", "scattered", "overlap") else 1 + position % 2
    options = {"samples": 2 * world // tp, "steps": 3, **VARIANTS[variant]}
    if variant == "uneven_tokens":
        options["samples"] = world // tp
    check(Case(model, world, tp, ep, zero, etp=etp, overrides=DIVISIBLE, **options))


@pytest.mark.parametrize(("variant", "sizes", "model"), TRIPLES[::3])
def test_variants(variant, sizes, model):
    check_variant(variant, sizes, model)


@pytest.mark.full
@pytest.mark.parametrize(("variant", "sizes", "model"), [each for each in TRIPLES if each not in TRIPLES[::3]])
def test_variants_full(variant, sizes, model):
    check_variant(variant, sizes, model)


# What ETP adds, switched off: the comparison must see it.


def _bias_on_every_peer(module, model_forward, layout, backend, rows, counts):
    """Trap 6: each peer adds the down projection's bias before the sum."""
    out = experts.run_experts(module, model_forward, layout, backend, rows, counts)
    return experts.finish_rows(module, layout, out, experts._row_experts(counts, rows.device))


def train_with_fault(case: Case, fault: str):
    import contextlib
    from unittest import mock

    from deepspeed_autoep.folding import families

    with contextlib.ExitStack() as stack:
        if fault == "bias_on_every_peer":
            stack.enter_context(mock.patch.object(layer, "run_experts", _bias_on_every_peer))
            stack.enter_context(mock.patch.object(layer, "finish_rows", lambda module, layout, rows, row_experts: rows))
        elif fault == "shared_bias_over_edp_only":
            stack.enter_context(mock.patch.object(layer, "mark_expert_shared_over_etp", lambda parameter: None))
        elif fault == "shared_bias_counted_by_every_peer":
            rule = replace(families.FAMILY_RULES[GradientFamily.EXPERT_SHARED_ETP], replicas=lambda spec: spec.edp_size)
            stack.enter_context(mock.patch.dict(families.FAMILY_RULES, {GradientFamily.EXPERT_SHARED_ETP: rule}))
        return train(case)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("bias_on_every_peer", "loss"), ("shared_bias_over_edp_only", "parameter"), ("shared_bias_counted_by_every_peer", "norm")],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_parity_sees_a_fault_of_etp(fault, error, zero):
    case = Case("gpt_oss", 4, 2, 1, zero, etp=2, optimizer="SGD")
    errors = worst_errors(run_on(4, train_with_fault, case, fault)[0], reference_of(case))
    assert errors[error] > 10 * (PARAMETER if error == "parameter" else LOSS_AND_NORM), errors
