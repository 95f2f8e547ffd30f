"""The main claim: loss, norm and parameters equal one plain PyTorch process on the whole batch.

CI runs every other (model, topology, ZeRO stage), in a chessboard's order, with optimizer and auxiliary loss alternating, so that
each pair of settings meets; ``make test-full`` runs the whole product.
"""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepspeed_autoep.folding import FAMILY_RULES, GradientFamily
from deepspeed_autoep.gradients import lanes, norms, sync
from tests.unit.models import FAMILIES, HAS_AUX_LOSS
from tests.unit.pool import run_on
from tests.unit.training import Case, reference_of, train, uncorrected, worst_errors

TOPOLOGIES = [(4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 2, 4), (4, 4, 2), (4, 4, 4), (8, 2, 4), (8, 4, 4)]
LOSS_AND_NORM, PARAMETER = 1e-5, 1e-4


def product() -> list[Case]:
    cases = []
    for family, (world, tp, ep), zero in itertools.product(FAMILIES, TOPOLOGIES, (0, 1, 2)):
        for optimizer, aux in itertools.product(("AdamW", "SGD"), (False, True)):
            if not aux or family in HAS_AUX_LOSS:
                cases.append(Case(family, world, tp, ep, zero, optimizer, aux, samples=4))
    return cases


def spread(cases: list[Case]) -> list[Case]:
    """One (optimizer, aux) of every other (family, topology, stage), walking through all of them."""
    variants: dict[tuple, list[Case]] = {}
    families = list(FAMILIES)
    for case in cases:
        topology = (case.world, case.tp, case.ep)
        if (families.index(case.family) + TOPOLOGIES.index(topology) + case.zero) % 2 == 0:
            variants.setdefault((case.family, topology, case.zero), []).append(case)
    return [
        options[(position + families.index(family)) % len(options)] for position, ((family, *_), options) in enumerate(variants.items())
    ]


CI_CASES = spread(product())


def check(case: Case) -> None:
    right = reference_of(case)
    assert min(right.norms) > case.clip, "clipping must be active"
    errors = worst_errors(run_on(case.world, train, case)[0], right)
    assert errors["loss"] <= LOSS_AND_NORM and errors["norm"] <= LOSS_AND_NORM and errors["parameter"] <= PARAMETER, errors


@pytest.mark.parametrize("case", CI_CASES, ids=str)
def test_parity(case):
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in product() if case not in CI_CASES], ids=str)
def test_parity_full(case):
    check(case)


# Each correction switched off: the comparison must see it.


def _rule(family: GradientFamily, **changes):
    return mock.patch.dict(FAMILY_RULES, {family: replace(FAMILY_RULES[family], **changes)})


def _without_verification():
    return mock.patch.object(lanes.LaneDeviation, "raise_if_any", lambda self: None)


def _replicas_on_lanes(spec):
    return spec.dp_size  # forgets that every lane holds a replicated parameter


SABOTAGES = {
    # name: (patches, which error must show)
    "no_tp_correction": (lambda: [mock.patch.object(sync.GradientSync, "correct", uncorrected)], "norm"),
    "no_expert_cancel": (lambda: [_rule(GradientFamily.EXPERT, tp_reduction="skip")], "norm"),
    "partial_averaged": (
        lambda: [_rule(GradientFamily.PARTIAL, tp_reduction="average"), _without_verification()],
        "parameter",
    ),
    "replicated_summed": (lambda: [_rule(GradientFamily.REPLICATED, tp_reduction="sum"), _without_verification()], "norm"),
    "lanes_counted": (lambda: [_rule(GradientFamily.REPLICATED, replicas=_replicas_on_lanes)], "norm"),
    "norm_of_own_rank": (
        lambda: [mock.patch.object(norms, "dist", SimpleNamespace(all_reduce=lambda *_, **__: None))],
        "norm",
    ),
}


def train_sabotaged(case: Case, name: str):
    with contextlib.ExitStack() as stack:
        for patch in SABOTAGES[name][0]():
            stack.enter_context(patch)
        return train(case)


IN_BUCKETS = (("tp_gradient_correction", "bucket"),)


@pytest.mark.parametrize("name", SABOTAGES)
@pytest.mark.parametrize(("zero", "place"), [(0, ()), (1, ()), (2, ()), (1, IN_BUCKETS), (2, IN_BUCKETS)])
def test_parity_sees_each_correction_switched_off(name, zero, place):
    case = Case("qwen3_moe", 4, 2, 1, zero, optimizer="SGD", expert_config=place)
    errors = worst_errors(run_on(4, train_sabotaged, case, name)[0], reference_of(case))
    limit = PARAMETER if SABOTAGES[name][1] == "parameter" else LOSS_AND_NORM
    assert errors[SABOTAGES[name][1]] > 10 * limit, errors


def test_each_pair_of_settings_meets():
    settings = [(case.family, (case.world, case.tp, case.ep), case.zero, case.optimizer, case.aux) for case in CI_CASES]
    for one, other in itertools.combinations(range(5), 2):
        met = {(each[one], each[other]) for each in settings}
        possible = {(each[one], each[other]) for each in itertools.product(FAMILIES, TOPOLOGIES, (0, 1, 2), ("AdamW", "SGD"), (False, True))}
        if {one, other} == {0, 4}:
            possible -= {(family, True) for family in FAMILIES if family not in HAS_AUX_LOSS}
        assert met == possible


def test_reference_differs_between_settings():
    """The oracle is no constant: optimizer, auxiliary loss and model move it."""
    cases = [Case(), Case(optimizer="SGD"), Case(aux=True), Case(family="olmoe")]
    finals = [reference_of(case).losses[-1] for case in cases]
    assert len({round(value, 4) for value in finals}) == len(cases)
    assert all(torch.isfinite(torch.tensor(finals)))
