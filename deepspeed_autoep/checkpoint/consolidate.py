"""Gather the whole model from its shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from deepspeed_autoep.compat import TensorParallel_Layer
from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.folding.groups import FoldingGroupHandles, all_gather_single
from deepspeed_autoep.moe.cutting import join_etp_parts
from deepspeed_autoep.moe.layer import AutoEPMoELayer
from deepspeed_autoep.moe.weight_layout import ExpertShard, ExpertTensor
from deepspeed_autoep.peft_adapters import ExpertAdapter, expert_adapters
from deepspeed_autoep.quantization.experts import QuantizerBuffer, join_buffer


@torch.no_grad()
def consolidated_state_dict(engine) -> dict[str, torch.Tensor] | None:
    """The model's full state dict, on the CPU, on rank 0; None elsewhere. Collective over all ranks.

    Keys, shapes and dtypes are those of the model before ``initialize``, so
    ``engine.module.save_pretrained(folder, state_dict=...)`` on rank 0 writes an ordinary Hugging Face checkpoint, or an
    ordinary PEFT adapter where the model is a PeftModel.
    Each rank holds one full tensor at a time; rank 0 holds the whole model in CPU memory.
    """
    if not hasattr(engine, "autoep"):
        raise ModelError(f"consolidated_state_dict takes an engine of deepspeed_autoep.initialize, got {type(engine).__name__}")
    keep = dist.get_rank() == 0
    full: dict[str, torch.Tensor] = {}
    gathered = gatherers(engine)
    quantizers = _gather_quantizers(engine)
    for name, tensor in engine.module.state_dict(keep_vars=True).items():
        if name in quantizers:
            values = quantizers[name]()
        else:
            values = {name: gathered[tensor]() if tensor in gathered else tensor.detach()}
        if keep:
            full |= {key: value.cpu().clone() for key, value in values.items()}
    return full if keep else None


def gatherers(engine) -> dict[torch.Tensor, Callable[[], torch.Tensor]]:
    """Sharded parameter -> a collective over all ranks that returns its full value on each."""
    found: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
    for module in engine.module.modules():
        if isinstance(module, AutoEPMoELayer):
            for tensor in module.autoep.layout.tensors:
                parameter = getattr(module, tensor.name)
                found[parameter] = partial(_gather_experts, parameter.detach(), tensor, engine.autoep.handles)
        elif isinstance(module, TensorParallel_Layer):
            for parameter in module.parameters(recurse=False):
                found[parameter] = partial(_gather_tp, module, parameter)
    for site in engine.autoep.sites:
        for adapter in expert_adapters(engine.module, site):
            found[adapter.parameter] = partial(_gather_expert_adapter, adapter, engine.autoep.handles)
    for name in engine.autoep.plan.cut_parameters:
        parameter = engine.module.get_parameter(name)
        found[parameter] = partial(_gather, parameter.detach(), engine.autoep.handles.tp_group)
    return found


def _gather_quantizers(engine) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """Name of a quantized expert's buffer, as this rank counts experts -> a collective that returns the whole buffers by name:
    those of all ranks' experts in this place."""
    found: dict[str, Callable[[], dict[str, torch.Tensor]]] = {}
    for name, module in engine.module.named_modules():
        for buffer in getattr(module, "autoep_quantizers", ()):
            found[f"{name}.{buffer.name}"] = partial(_gather_quantizer, name, module, buffer, engine.autoep.handles)
    return found


def _gather_quantizer(prefix: str, module: AutoEPMoELayer, buffer: QuantizerBuffer, handles: FoldingGroupHandles) -> dict[str, torch.Tensor]:
    spec, held = handles.spec, module.get_buffer(buffer.name)
    parts = _gather(_gather(held.reshape(1, -1), handles.etp_group), handles.ep_group).view(spec.ep_size, spec.etp_size, *held.shape)
    shards = [
        [ExpertShard.of(module.autoep.layout.num_experts, spec.ep_size, ep_rank, spec.etp_size, etp_rank) for etp_rank in range(spec.etp_size)]
        for ep_rank in range(spec.ep_size)
    ]
    pieces = [list(zip(row, part, strict=True)) for row, part in zip(shards, parts, strict=True)]
    if buffer.expert is None:
        return {f"{prefix}.{buffer.name}": join_buffer([piece for row in pieces for piece in row], buffer)}
    return {f"{prefix}.{buffer.logical_name(row[0].first)}": join_buffer(own, buffer) for row, own in zip(shards, pieces, strict=True)}


def _gather_experts(local: torch.Tensor, tensor: ExpertTensor, handles: FoldingGroupHandles) -> torch.Tensor:
    """[E / ep, ..., 1/etp of I, ...] -> [E, ..., I, ...]."""
    whole = join_etp_parts(_gather(local, handles.etp_group).chunk(handles.spec.etp_size), tensor)
    return _gather(whole, handles.ep_group)


def gather_expert(local: torch.Tensor, tensor: ExpertTensor, handles: FoldingGroupHandles, expert: int) -> torch.Tensor:
    """Expert ``expert`` of a stacked tensor, ``[1, ..., I, ...]``, on every rank. ``local``: this rank's part. Collective over all ranks."""
    owner, place = divmod(expert, local.shape[0])
    row = local[place : place + 1]
    whole = join_etp_parts(_gather(row, handles.etp_group).chunk(handles.spec.etp_size), tensor).contiguous()
    dist.broadcast(whole, handles.ep_ranks[owner], group=handles.ep_group)
    return whole


def _gather_expert_adapter(adapter: ExpertAdapter, handles: FoldingGroupHandles) -> torch.Tensor:
    """As PEFT stores it: see :class:`ExpertAdapter`."""
    local = adapter.stacked(adapter.tensor.shape[0] // handles.spec.ep_size)
    return adapter.flat(_gather_experts(local, adapter.tensor, handles))


def _gather(local: torch.Tensor, group) -> torch.Tensor:
    """The group's tensors, joined along dimension 0."""
    full = local.new_empty(local.shape[0] * dist.get_world_size(group), *local.shape[1:])
    all_gather_single(full, local.contiguous(), group=group)
    return full


def _gather_tp(module: TensorParallel_Layer, parameter: torch.nn.Parameter) -> torch.Tensor:
    """AutoTP's own gather, which knows each layer's cut. It replaces ``data``; the shard is put back."""
    shard = parameter.data
    try:
        # Its list is [weight, bias]: the position tells it which of the two a tensor is.
        position = 0 if parameter is module.weight else 1
        module.gather_params([None] * position + [parameter])
        return parameter.data.clone()
    finally:
        parameter.data = shard
