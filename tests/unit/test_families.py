"""The gradient rule table, written out from DESIGN section 4 and derived from who holds which element."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from deepspeed_autoep.errors import FamilyError
from deepspeed_autoep.folding.families import (
    AUTOEP_FOLDING_GRAD_CORRECTED_ATTR,
    AUTOEP_FOLDING_PARAM_FAMILY_ATTR,
    EXPERT_SHARED_ETP_PARAM,
    FAMILY_RULES,
    GradientFamily,
    clear_autoep_folding_gradient_corrected,
    is_autoep_folding_gradient_corrected,
    mark_autoep_folding_partial_router_parameter,
    mark_autoep_folding_router_parameter,
    mark_autoep_folding_sp_sharded_layernorm_parameter,
    mark_tp_partial_parameter,
    resolve_family,
    set_autoep_folding_gradient_corrected,
)
from deepspeed_autoep.folding.spec import build_folding_spec, expected_folding_group_tables

F = GradientFamily
# (world, tp, ep, etp) -> dp, edp
SPECS = {
    (1, 1, 1, 1): (1, 1),
    (4, 2, 2, 1): (2, 2),
    (4, 2, 4, 1): (2, 1),
    (4, 4, 1, 1): (1, 4),
    (8, 2, 2, 2): (4, 2),
    (6, 2, 1, 3): (3, 2),
    (12, 2, 2, 3): (6, 2),
    (12, 3, 2, 2): (4, 3),
}
# family -> TP rule, TP factor, data group, replicas; as the design states it.
TABLE = {
    F.TP_SHARDED: ("skip", lambda tp: 1, "dense_dp", lambda dp, tp, edp, etp: dp),
    F.REPLICATED: ("average", lambda tp: 1 / tp, "dense_dp", lambda dp, tp, edp, etp: dp * tp),
    F.PARTIAL: ("sum", lambda tp: 1, "dense_dp", lambda dp, tp, edp, etp: dp * tp),
    F.EXPERT: ("expert_tp_cancel", lambda tp: 1 / tp, "edp", lambda dp, tp, edp, etp: edp),
    F.EXPERT_SHARED_ETP: ("expert_tp_cancel", lambda tp: 1 / tp, "expert_shared", lambda dp, tp, edp, etp: edp * etp),
    F.EXPERT_COMMON: ("average", lambda tp: 1 / tp, "dense_dp", lambda dp, tp, edp, etp: dp * tp),
}
FAMILY_BY_SPEC = list(itertools.product(F, SPECS))


def spec_of(world: int, tp: int, ep: int, etp: int, mp_mode: str = "tp"):
    return build_folding_spec(world_size=world, pp_size=1, tp_size=tp, ep_size=ep, etp_size=etp, mp_mode=mp_mode)


def shard_of_rank(family: GradientFamily, world: int, tp: int, ep: int, etp: int) -> list:
    """For each rank, which of the parameter's elements it holds: its coordinates along the axes that cut the family."""
    dense = np.indices((world // tp, tp)).reshape(2, world)
    expert = np.indices((world // (ep * etp), ep, etp)).reshape(3, world)
    axes = {
        F.TP_SHARDED: [dense[1]],
        F.REPLICATED: [],
        F.PARTIAL: [],
        F.EXPERT: [expert[1], expert[2]],
        F.EXPERT_SHARED_ETP: [expert[1]],
        F.EXPERT_COMMON: [],
    }[family]
    return [tuple(int(axis[rank]) for axis in axes) for rank in range(world)]


def parameter(**attributes) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


def marked(mark) -> SimpleNamespace:
    target = parameter()
    mark(target)
    return target


def test_every_family_has_one_rule():
    assert set(FAMILY_RULES) == set(F) == set(TABLE)


@pytest.mark.parametrize("family, sizes", FAMILY_BY_SPEC)
def test_rules_equal_the_design_table(family, sizes):
    rule, (tp_rule, factor, data_group, replicas) = FAMILY_RULES[family], TABLE[family]
    (_, tp, _, etp), (dp, edp) = sizes, SPECS[sizes]
    assert rule.tp_reduction == tp_rule
    assert rule.tp_factor(tp) == factor(tp)
    assert rule.data_group == data_group
    assert rule.replicas(spec_of(*sizes)) == replicas(dp, tp, edp, etp)


@pytest.mark.parametrize("family, sizes", FAMILY_BY_SPEC)
def test_each_element_counts_once_in_the_norm(family, sizes):
    shards, replicas = shard_of_rank(family, *sizes), FAMILY_RULES[family].replicas(spec_of(*sizes))
    assert set(Counter(shards).values()) == {replicas}
    assert sum(Fraction(1, replicas) for _ in shards) == len(set(shards))


@pytest.mark.parametrize("family, sizes", FAMILY_BY_SPEC)
def test_data_group_holds_exactly_the_replicas_that_tp_leaves(family, sizes):
    """One data group holds the same elements; with its lanes, where TP does not cut, it is all of their holders."""
    tables = expected_folding_group_tables(spec_of(*sizes))
    shards, tp = shard_of_rank(family, *sizes), sizes[1]
    holders = Counter(shards)
    lanes = tp if family in (F.REPLICATED, F.PARTIAL, F.EXPERT_COMMON) else 1
    for group in getattr(tables, f"{FAMILY_RULES[family].data_group}_groups"):
        assert len({shards[rank] for rank in group}) == 1
        assert len(group) * lanes == holders[shards[group[0]]]


@pytest.mark.parametrize(
    "family, is_expert, meets_tp_peers",
    [
        (F.TP_SHARDED, False, False),
        (F.REPLICATED, False, True),
        (F.PARTIAL, False, True),
        (F.EXPERT, True, False),
        (F.EXPERT_SHARED_ETP, True, False),
        (F.EXPERT_COMMON, False, True),
    ],
)
def test_family_predicates(family, is_expert, meets_tp_peers):
    assert (family.is_expert, family.meets_tp_peers) == (is_expert, meets_tp_peers)


@pytest.mark.parametrize(
    "make, mp_mode, expected",
    [
        (parameter, "tp", F.REPLICATED),
        (lambda: parameter(allreduce=True), "tp", F.REPLICATED),
        (lambda: parameter(tensor_model_parallel=False), "tp", F.REPLICATED),
        (lambda: parameter(tensor_model_parallel=True), "tp", F.TP_SHARDED),
        (lambda: parameter(model_parallel=True), "tp", F.TP_SHARDED),
        (lambda: parameter(allreduce=False), "tp", F.EXPERT),
        (lambda: parameter(allreduce=False, group_name="ep_size_2"), "tp", F.EXPERT),
        (
            lambda: parameter(allreduce=False, **{AUTOEP_FOLDING_PARAM_FAMILY_ATTR: EXPERT_SHARED_ETP_PARAM}),
            "tp",
            F.EXPERT_SHARED_ETP,
        ),
        (lambda: marked(mark_autoep_folding_router_parameter), "tp", F.REPLICATED),
        (lambda: marked(mark_autoep_folding_partial_router_parameter), "tp", F.PARTIAL),
        (lambda: marked(mark_autoep_folding_partial_router_parameter), "sp", F.PARTIAL),
        (lambda: marked(mark_autoep_folding_sp_sharded_layernorm_parameter), "tp", F.REPLICATED),
        (lambda: marked(mark_autoep_folding_sp_sharded_layernorm_parameter), "sp", F.PARTIAL),
        (lambda: marked(mark_tp_partial_parameter), "tp", F.PARTIAL),
        (lambda: marked(mark_tp_partial_parameter), "sp", F.PARTIAL),
    ],
)
def test_marks_resolve_to_families(make, mp_mode, expected):
    assert resolve_family(make(), spec_of(4, 2, 2, 1, mp_mode), "some.weight") is expected


PARTIAL_MARK = {AUTOEP_FOLDING_PARAM_FAMILY_ATTR: "tp_partial"}
UNKNOWN_MARK = {AUTOEP_FOLDING_PARAM_FAMILY_ATTR: "nonsense"}
SHARED_ETP_MARK = {AUTOEP_FOLDING_PARAM_FAMILY_ATTR: EXPERT_SHARED_ETP_PARAM}


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"allreduce": False, "tensor_model_parallel": True}, ["allreduce=False", "tensor-parallel shard"]),
        ({"allreduce": False, "model_parallel": True}, ["allreduce=False", "tensor-parallel shard"]),
        ({"allreduce": False, **PARTIAL_MARK}, ["expert", "'tp_partial'"]),
        ({"allreduce": False, **UNKNOWN_MARK}, ["expert", "'nonsense'"]),
        ({"tensor_model_parallel": True, **PARTIAL_MARK}, ["tensor-parallel shard", "'tp_partial'"]),
        ({"tensor_model_parallel": True, **SHARED_ETP_MARK}, ["tensor-parallel shard", f"'{EXPERT_SHARED_ETP_PARAM}'"]),
        (UNKNOWN_MARK, ["unknown", "'nonsense'"]),
        (SHARED_ETP_MARK, ["unknown", f"'{EXPERT_SHARED_ETP_PARAM}'"]),  # an expert's mark on a dense parameter
    ],
)
def test_contradictory_and_unknown_marks_name_the_parameter(attributes, words):
    with pytest.raises(FamilyError) as caught:
        resolve_family(parameter(**attributes), spec_of(4, 2, 2, 1), "model.layers.3.odd.weight")
    for word in ["'model.layers.3.odd.weight'", *words]:
        assert word in str(caught.value)


def test_correction_marker_opens_and_closes():
    target = parameter()
    assert not is_autoep_folding_gradient_corrected(target)
    clear_autoep_folding_gradient_corrected(target)
    assert not hasattr(target, AUTOEP_FOLDING_GRAD_CORRECTED_ATTR)
    set_autoep_folding_gradient_corrected(target)
    assert is_autoep_folding_gradient_corrected(target)
    clear_autoep_folding_gradient_corrected(target)
    assert not is_autoep_folding_gradient_corrected(target)
