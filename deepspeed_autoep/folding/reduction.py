"""DeepSpeed's per-parameter form of the TP correction, kept for code written against it.

The engine corrects many parameters in one collective (:mod:`deepspeed_autoep.gradients.reducer`); both read the
same table.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed_autoep.folding.families import (
    AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE,
    AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL,
    AUTOEP_FOLDING_GRAD_REDUCE_SKIP,
    autoep_folding_gradient_reduction_strategy,
    is_autoep_folding_gradient_corrected,
    set_autoep_folding_gradient_corrected,
)
from deepspeed_autoep.folding.spec import ParallelFoldingSpec


@torch.no_grad()
def reduce_autoep_folding_gradient(
    folding_spec: ParallelFoldingSpec | None,
    param,
    grad,
    *,
    tp_group,
    param_name: str | None = None,
) -> str:
    """Apply the TP rule of ``param`` to ``grad`` in place (16-bit gradients are summed in fp32) and return its name.

    A sparse or missing gradient is left alone.
    """
    strategy = autoep_folding_gradient_reduction_strategy(folding_spec, param, param_name=param_name)
    if strategy == AUTOEP_FOLDING_GRAD_REDUCE_SKIP or grad is None or grad.data.is_sparse:
        return strategy

    tp_size = dist.get_world_size(group=tp_group)
    if strategy == AUTOEP_FOLDING_GRAD_REDUCE_EXPERT_TP_CANCEL:
        if tp_size > 1:
            grad.data.div_(tp_size)
        return strategy

    # Gradients may arrive transposed or expanded; a collective needs them packed.
    reduced = grad.data.to(torch.float32).contiguous()
    dist.all_reduce(reduced, group=tp_group)
    if strategy == AUTOEP_FOLDING_GRAD_REDUCE_AVERAGE:
        reduced.div_(tp_size)
    if reduced.data_ptr() != grad.data.data_ptr():
        grad.data.copy_(reduced)
    return strategy


def apply_folding_correction_to_grad_buffer(
    folding_spec: ParallelFoldingSpec | None,
    param,
    grad,
    *,
    tp_group,
    param_name: str | None = None,
    use_correction_marker: bool = True,
) -> str:
    """As :func:`reduce_autoep_folding_gradient`, once a step: a marked parameter is skipped, then marked."""
    if use_correction_marker and is_autoep_folding_gradient_corrected(param):
        return AUTOEP_FOLDING_GRAD_REDUCE_SKIP
    strategy = reduce_autoep_folding_gradient(folding_spec, param, grad, tp_group=tp_group, param_name=param_name)
    if use_correction_marker and strategy != AUTOEP_FOLDING_GRAD_REDUCE_SKIP:
        set_autoep_folding_gradient_corrected(param)
    return strategy
