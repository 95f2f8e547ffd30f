"""The MoE layer: an experts module that keeps its identity and holds this rank's experts only.

The module's class is swapped for one made of ``(AutoEPMoELayer, its own class)`` and its parameters are cut in place,
as PyTorch FSDP2's ``fully_shard`` does: names, hooks, buffers, ``isinstance`` and every reference to the
``Parameter`` objects (optimizers, parameter groups) stay true. Router, shared experts and the block around stay the
model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.folding.families import mark_expert_common_parameter, mark_expert_shared_over_etp
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.moe.cutting import cut_expert_tensor
from deepspeed_autoep.moe.discovery import ExpertsSite
from deepspeed_autoep.moe.dispatch import TokenDispatcher
from deepspeed_autoep.moe.experts import RowCounts, finish_rows, run_experts
from deepspeed_autoep.moe.interface_check import InterfaceCheck
from deepspeed_autoep.moe.lane_check import assert_lanes_agree
from deepspeed_autoep.moe.weight_layout import POST_EXPERT_NORM, ExpertLayout, ExpertShard


@dataclass(frozen=True)
class LayerContext:
    """What a layer needs beside its module: where it is in the model, in the topology, and how it computes."""

    name: str
    layout: ExpertLayout  # of the whole module, before the cut
    shard: ExpertShard  # what this rank holds of it
    handles: FoldingGroupHandles
    backend: str
    validate_routing: bool


class AutoEPMoELayer(nn.Module):
    """Mixed in before the model's own experts class by :func:`convert_experts`."""

    # DeepSpeed's AutoTP leaves modules with this attribute alone.
    _is_autoep_layer = True
    autoep: LayerContext
    autoep_dispatcher: TokenDispatcher
    autoep_check: InterfaceCheck | None = None  # in the first forwards
    # Around the local experts' arithmetic, where something must be checked of it.
    autoep_guard: Callable[[nn.Module, RowCounts], AbstractContextManager] | None = None

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., H], top_k_index [T, K] global experts, top_k_weights [T, K] -> as hidden_states.

        Identical inputs on every lane of a TP group give identical outputs on every lane.
        """
        context, shape = self.autoep, hidden_states.shape
        if top_k_index.dim() != 2 or top_k_index.shape != top_k_weights.shape:
            raise ModelError(
                f"experts module {context.name!r} was called with top_k_index {list(top_k_index.shape)} and top_k_weights "
                f"{list(top_k_weights.shape)}: both must be [tokens, top_k]"
            )
        if context.validate_routing and context.handles.spec.tp_size > 1:
            assert_lanes_agree(
                f"routing in {context.name!r}",
                [top_k_index, hidden_states],
                context.handles.spec,
                context.handles.stage_group,
                "Give the lanes the same samples and the same random state (router jitter, dropout).",
            )
        hidden = hidden_states.reshape(-1, shape[-1])
        with self.autoep_check.calling(context.name) if self.autoep_check is not None else contextlib.nullcontext():
            output = self.autoep_dispatcher(hidden, top_k_index, top_k_weights, self._run_local_experts, self._finish_rows)
        return output.reshape(shape)

    def _run_local_experts(self, rows: torch.Tensor, counts: RowCounts) -> torch.Tensor:
        with self.autoep_guard(self, counts) if self.autoep_guard is not None else contextlib.nullcontext():
            return run_experts(self, super().forward, self.autoep.layout, self.autoep.backend, rows, counts)

    def _finish_rows(self, rows: torch.Tensor, row_experts: torch.Tensor) -> torch.Tensor:
        return finish_rows(self, self.autoep.layout, rows, row_experts)

    def extra_repr(self) -> str:
        spec, shard = self.autoep.handles.spec, self.autoep.shard
        etp = f", 1/{spec.etp_size} of each" if spec.etp_size > 1 else ""
        return f"experts={shard.first}..{shard.last - 1} of {self.autoep.layout.num_experts}{etp}, ep={spec.ep_size}, tp={spec.tp_size}"


# Attributes in which experts classes keep I: their own forward may read it.
_INTERMEDIATE_SIZES = ("intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_dim")
_CLASSES: dict[type, type] = {}


def _layer_class(experts_class: type) -> type:
    if experts_class not in _CLASSES:
        _CLASSES[experts_class] = type(f"AutoEP{experts_class.__name__}", (AutoEPMoELayer, experts_class), {})
    return _CLASSES[experts_class]


def convert_experts(site: ExpertsSite, handles: FoldingGroupHandles, *, backend: str, validate_routing: bool) -> None:
    """Turn one experts module into this rank's part of it, in place. Local: no collective.

    Marks each parameter ``allreduce = False`` and ``group_name`` (DeepSpeed's convention for experts, which drives the
    reduction over EDP, the broadcast and the ZeRO partition).
    """
    module, spec, layout = site.module, handles.spec, site.layout
    shard = ExpertShard.of(layout.num_experts, spec.ep_size, handles.ep_rank, spec.etp_size, handles.etp_rank)
    for tensor in layout.tensors:
        parameter = getattr(module, tensor.name)
        if parameter.shape == torch.Size(tensor.shape):  # else cut already: two modules share it
            with torch.no_grad():
                parameter.data = cut_expert_tensor(parameter.data, tensor, shard)
        parameter.allreduce = False
        parameter.group_name = handles.ep_group_name
        if tensor.intermediate_dim is None and spec.etp_size > 1:
            mark_expert_shared_over_etp(parameter)
            parameter.group_name = handles.expert_shared_name
    if layout.has_post_expert_norm:
        for parameter in getattr(module, POST_EXPERT_NORM).parameters():
            mark_expert_common_parameter(parameter)
    module.__class__ = _layer_class(type(module))
    module.num_experts = shard.last - shard.first
    for name in _INTERMEDIATE_SIZES:
        if getattr(module, name, None) == layout.intermediate_size:
            setattr(module, name, layout.intermediate_size // spec.etp_size)
    module.autoep = LayerContext(site.name, layout, shard, handles, backend, validate_routing)
    module.autoep_dispatcher = TokenDispatcher(
        num_experts=site.layout.num_experts,
        tp_group=handles.tp_group,
        tp_size=spec.tp_size,
        lane=handles.tp_rank,
        ep_group=handles.ep_group,
        etp_group=handles.etp_group,
    )
