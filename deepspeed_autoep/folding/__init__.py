"""Topology, gradient families and process groups. A superset of DeepSpeed 0.19.8's ``auto_ep_folding``."""

from deepspeed_autoep.folding.families import (
    AUTOEP_FOLDING_GRAD_CORRECTED_ATTR,
    AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE,
    AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL,
    AUTOEP_FOLDING_GRAD_REDUCE_SKIP,
    AUTOEP_FOLDING_GRAD_REDUCE_SUM,
    AUTOEP_FOLDING_PARAM_FAMILY_ATTR,
    AUTOEP_FOLDING_ROUTER_GATE_PARTIAL_PARAM,
    AUTOEP_FOLDING_ROUTER_GATE_REPLICATED_PARAM,
    AUTOEP_FOLDING_SP_SHARDED_LAYERNORM_PARAM,
    FAMILY_RULES,
    FamilyRule,
    GradientFamily,
    autoep_folding_gradient_reduction_strategy,
    clear_autoep_folding_gradient_corrected,
    is_autoep_folding_gradient_corrected,
    mark_autoep_folding_partial_router_parameter,
    mark_autoep_folding_router_parameter,
    mark_autoep_folding_sp_sharded_layernorm_parameter,
    mark_expert_common_parameter,
    mark_expert_shared_over_etp,
    mark_tp_partial_parameter,
    resolve_family,
)
from deepspeed_autoep.folding.groups import (
    FoldingGroupHandles,
    collectively,
    create_folding_groups,
    validate_folding_agreement,
)
from deepspeed_autoep.folding.reduction import (
    apply_folding_correction_to_grad_buffer,
    reduce_autoep_folding_gradient,
)
from deepspeed_autoep.folding.spec import (
    FoldingGroupTables,
    ParallelFoldingSpec,
    assert_group_matches_spec,
    build_folding_spec,
    expected_folding_group_tables,
    folding_ranks_of,
    local_folding_ranks,
    validate_folding_global,
)

__all__ = [name for name in dir() if not name.startswith("_") and name not in ("families", "groups", "reduction", "spec")]
