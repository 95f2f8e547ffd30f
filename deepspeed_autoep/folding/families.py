"""The one gradient rule table, and how a parameter finds its row. Pure: no processes, no DeepSpeed.

Each lane of a TP group computes the same loss and differentiates its own copy. What that leaves in a parameter's
gradient, and so what must happen to it, depends only on the parameter's *family*:

==================  ==========================  ======================  =====================
family              over TP                     then over data          replicas per element
==================  ==========================  ======================  =====================
TP_SHARDED          nothing                     sum over DP, / dp       dp
REPLICATED          average                     sum over DP, / dp       dp * tp
PARTIAL             sum                         sum over DP, / dp       dp * tp
EXPERT              times 1/tp, no collective   sum over EDP, / dp      edp
EXPERT_SHARED_ETP   times 1/tp, no collective   sum over EDP x ETP, /dp edp * etp
EXPERT_COMMON       average                     sum over DP, / dp       dp * tp
==================  ==========================  ======================  =====================

EXPERT_COMMON is a parameter that all experts share (a norm on their output): every rank has the gradient of the rows that
its experts computed, ``tp`` times too large as an expert's, so what remains is a sum over the stage, / tp / dp. Its rule
reads as REPLICATED's, but lanes differ before it.

With ``tp = 1`` every TP step is the identity. Nothing else in the package decides what happens to a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from deepspeed_autoep.errors import FamilyError
from deepspeed_autoep.folding.spec import ParallelFoldingSpec

# Names and values of DeepSpeed 0.19.8's module_inject/auto_ep_folding.py.
AUTOEP_FOLDING_PARAM_FAMILY_ATTR = "ds_autoep_folding_param_family"
AUTOEP_FOLDING_ROUTER_GATE_REPLICATED_PARAM = "router_gate_replicated"
AUTOEP_FOLDING_ROUTER_GATE_PARTIAL_PARAM = "router_gate_partial"
AUTOEP_FOLDING_SP_SHARDED_LAYERNORM_PARAM = "sp_sharded_layernorm"
AUTOEP_FOLDING_GRAD_CORRECTED_ATTR = "ds_autoep_folding_grad_corrected"
AUTOEP_FOLDING_GRAD_REDUCE_SKIP = "skip"
AUTOEP_FOLDING_GRAD_REDUCE_SUM = "sum"
AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE = "average"
AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL = "expert_tp_cancel"

# Ours: a replicated weight that works on one lane's shard only (q_norm/k_norm on sharded heads), an expert parameter
# that every ETP peer holds whole, and a parameter that all experts share.
TP_PARTIAL_PARAM = "tp_partial"
EXPERT_SHARED_ETP_PARAM = "expert_shared_etp"
EXPERT_COMMON_PARAM = "expert_common"


class GradientFamily(Enum):
    TP_SHARDED = "tp_sharded"
    REPLICATED = "replicated"
    PARTIAL = "partial"
    EXPERT = "expert"
    EXPERT_SHARED_ETP = "expert_shared_etp"
    EXPERT_COMMON = "expert_common"

    @property
    def is_expert(self) -> bool:
        """Reduced in the expert view (EDP) instead of the dense one (DP)."""
        return FAMILY_RULES[self].data_group != "dense_dp"

    @property
    def meets_tp_peers(self) -> bool:
        """Needs a collective over TP."""
        return FAMILY_RULES[self].tp_reduction in (AUTOEP_FOLDING_GRAD_REDUCE_SUM, AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE)


@dataclass(frozen=True)
class FamilyRule:
    """One row of the table."""

    tp_reduction: str  # skip | average | sum | expert_tp_cancel
    data_group: str  # dense_dp | edp | expert_shared: the group summed over after TP; the divisor is always dp
    replicas: Callable[[ParallelFoldingSpec], int]  # ranks of a stage that hold the same element

    def tp_factor(self, tp_size: int) -> float:
        """What the gradient (after the TP sum, where the rule has one) is multiplied by."""
        scaled = self.tp_reduction in (AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE, AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL)
        return 1.0 / tp_size if scaled else 1.0


FAMILY_RULES: dict[GradientFamily, FamilyRule] = {
    GradientFamily.TP_SHARDED: FamilyRule(AUTOEP_FOLDING_GRAD_REDUCE_SKIP, "dense_dp", lambda s: s.dp_size),
    GradientFamily.REPLICATED: FamilyRule(
        AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE, "dense_dp", lambda s: s.dp_size * s.tp_size
    ),
    GradientFamily.PARTIAL: FamilyRule(AUTOEP_FOLDING_GRAD_REDUCE_SUM, "dense_dp", lambda s: s.dp_size * s.tp_size),
    GradientFamily.EXPERT: FamilyRule(AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL, "edp", lambda s: s.edp_size),
    GradientFamily.EXPERT_SHARED_ETP: FamilyRule(
        AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL, "expert_shared", lambda s: s.edp_size * s.etp_size
    ),
    GradientFamily.EXPERT_COMMON: FamilyRule(
        AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE, "dense_dp", lambda s: s.dp_size * s.tp_size
    ),
}


def mark_autoep_folding_router_parameter(param) -> None:
    """Mark a router parameter that every lane applies to the same tokens: REPLICATED (average over TP)."""
    setattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, AUTOEP_FOLDING_ROUTER_GATE_REPLICATED_PARAM)


def mark_autoep_folding_partial_router_parameter(param) -> None:
    """Mark a router parameter placed behind the token cut, so that each lane sees its own tokens only: PARTIAL (sum)."""
    setattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, AUTOEP_FOLDING_ROUTER_GATE_PARTIAL_PARAM)


def mark_autoep_folding_sp_sharded_layernorm_parameter(param) -> None:
    """Mark a LayerNorm under sequence parallelism: PARTIAL when ``mp_mode`` is "sp", else REPLICATED."""
    setattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, AUTOEP_FOLDING_SP_SHARDED_LAYERNORM_PARAM)


def mark_tp_partial_parameter(param) -> None:
    """Mark a replicated parameter that one lane's shard feeds (HF style ``replicated_with_grad_allreduce``): PARTIAL."""
    setattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, TP_PARTIAL_PARAM)


def mark_expert_shared_over_etp(param) -> None:
    """Mark an expert's parameter that every ETP peer holds whole: EXPERT_SHARED_ETP."""
    setattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, EXPERT_SHARED_ETP_PARAM)


def mark_expert_common_parameter(param) -> None:
    """Mark a parameter that all experts share: EXPERT_COMMON."""
    setattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, EXPERT_COMMON_PARAM)


def _family_of_mark(mark: str, mp_mode: str) -> GradientFamily | None:
    if mark == EXPERT_COMMON_PARAM:
        return GradientFamily.EXPERT_COMMON
    if mark == TP_PARTIAL_PARAM:
        return GradientFamily.PARTIAL
    if mark == AUTOEP_FOLDING_ROUTER_GATE_REPLICATED_PARAM:
        return GradientFamily.REPLICATED
    if mark == AUTOEP_FOLDING_ROUTER_GATE_PARTIAL_PARAM:
        return GradientFamily.PARTIAL if mp_mode in ("tp", "sp") else GradientFamily.REPLICATED
    if mark == AUTOEP_FOLDING_SP_SHARDED_LAYERNORM_PARAM:
        return GradientFamily.PARTIAL if mp_mode == "sp" else GradientFamily.REPLICATED
    return None


def is_expert_parameter(param) -> bool:
    """DeepSpeed's convention: ``param.allreduce = False``."""
    return hasattr(param, "allreduce") and not param.allreduce


def is_tp_sharded_parameter(param) -> bool:
    """DeepSpeed's convention: ``param.tensor_model_parallel`` (AutoTP) or ``param.model_parallel``."""
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


def resolve_family(param, spec: ParallelFoldingSpec, param_name: str) -> GradientFamily:
    """The family of one parameter, from its marks.

    Raises :class:`FamilyError` for marks that contradict each other or that are unknown: a guess would train on a
    wrong gradient without a word.
    """
    mark = getattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, None)
    expert, sharded = is_expert_parameter(param), is_tp_sharded_parameter(param)
    if expert and sharded:
        raise FamilyError(
            f"parameter {param_name!r} is marked both as an expert's (allreduce=False) and as a tensor-parallel shard: "
            "an expert's weight is cut by expert_parallel.expert_tensor_parallel_size, never by tensor_parallel; "
            "exclude it from tensor_parallel.partition_config"
        )
    if expert:
        if mark not in (None, EXPERT_SHARED_ETP_PARAM):
            raise FamilyError(f"expert parameter {param_name!r} has the mark {mark!r}: legal are none and {EXPERT_SHARED_ETP_PARAM!r}")
        return GradientFamily.EXPERT_SHARED_ETP if mark == EXPERT_SHARED_ETP_PARAM else GradientFamily.EXPERT
    if sharded:
        if mark is not None:
            raise FamilyError(
                f"parameter {param_name!r} is a tensor-parallel shard and has the mark {mark!r}: a shard is reduced over DP only"
            )
        return GradientFamily.TP_SHARDED
    if mark is None:
        return GradientFamily.REPLICATED
    family = _family_of_mark(mark, spec.mp_mode)
    if family is None:
        raise FamilyError(f"parameter {param_name!r} has the unknown family mark {mark!r} in {AUTOEP_FOLDING_PARAM_FAMILY_ATTR}")
    return family


def autoep_folding_gradient_reduction_strategy(
    folding_spec: ParallelFoldingSpec | None,
    param,
    *,
    param_name: str | None = None,
) -> str:
    """What the table does to a gradient over TP: "skip", "average", "sum" or "expert_tp_cancel".

    As in DeepSpeed a tensor-parallel mark wins over an expert mark here, and an unknown mark means "average"; the
    engine itself goes through :func:`resolve_family`, which refuses both.
    """
    if folding_spec is None or getattr(folding_spec, "tp_size", 1) <= 1:
        return AUTOEP_FOLDING_GRAD_REDUCE_SKIP
    if is_tp_sharded_parameter(param):
        family = GradientFamily.TP_SHARDED
    elif is_expert_parameter(param):
        family = GradientFamily.EXPERT
    else:
        mark = getattr(param, AUTOEP_FOLDING_PARAM_FAMILY_ATTR, None)
        family = _family_of_mark(mark, getattr(folding_spec, "mp_mode", "tp")) or GradientFamily.REPLICATED
    return FAMILY_RULES[family].tp_reduction


def is_autoep_folding_gradient_corrected(param) -> bool:
    """Whether this parameter's gradient went through its TP rule in this optimizer step already."""
    return bool(getattr(param, AUTOEP_FOLDING_GRAD_CORRECTED_ATTR, False))


def set_autoep_folding_gradient_corrected(param) -> None:
    setattr(param, AUTOEP_FOLDING_GRAD_CORRECTED_ATTR, True)


def clear_autoep_folding_gradient_corrected(param) -> None:
    """Open the parameter for the next optimizer step's correction."""
    if hasattr(param, AUTOEP_FOLDING_GRAD_CORRECTED_ATTR):
        setattr(param, AUTOEP_FOLDING_GRAD_CORRECTED_ATTR, False)
