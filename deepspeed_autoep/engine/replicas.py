"""Make every rank of a stage start from the same model and, in a TP group, from the same random state.

DeepSpeed broadcasts over data-parallel groups only: lanes that were initialised differently would stay different, and
hold slices of different models.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.gradients.slices import ParameterInfo
from deepspeed_autoep.moe.lane_check import checksum


def _named_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def differing_tensors(
    named: list[tuple[str, torch.Tensor]], handles: FoldingGroupHandles, device: torch.device
) -> list[tuple[str, torch.Tensor]]:
    """Those that are not bit-equal on all ranks of the stage, by their checksums. Collective over the stage."""
    if not named:
        return []
    mine = torch.stack([checksum([tensor]).cpu() for _, tensor in named]).to(device)
    first = mine.clone()
    dist.broadcast(first, handles.stage_ranks[0], group=handles.stage_group)
    differs = (mine != first).to(torch.int32)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=handles.stage_group)
    return [entry for entry, flag in zip(named, differs.tolist(), strict=True) if flag]


@torch.no_grad()
def synchronize_model(model: nn.Module, handles: FoldingGroupHandles, device: torch.device) -> list[str]:
    """Give every rank the weights and buffers of the stage's first rank. Call before anything is cut.

    Checksums are compared first, so that equal models (the usual case) cost one read and one small collective.
    Returns the names that differed.
    """
    changed = differing_tensors(_named_state(model), handles, device)
    source = handles.stage_ranks[0]
    for _, tensor in changed:
        buffer = tensor.detach().to(device).contiguous()
        raw = buffer.view(-1).view(torch.uint8) if buffer.dtype != torch.bool else buffer
        dist.broadcast(raw, source, group=handles.stage_group)
        tensor.data.copy_(buffer)
    return [name for name, _ in changed]


def synchronize_random_state(handles: FoldingGroupHandles, device: torch.device) -> None:
    """Lanes of a TP group take lane 0's random state: router jitter and dropout must agree between them."""
    if handles.spec.tp_size == 1:
        return
    accelerator = get_accelerator()
    states = [(torch.get_rng_state, torch.set_rng_state)]
    if device.type != "cpu":
        states.append((accelerator.get_rng_state, accelerator.set_rng_state))
    for read, write in states:
        state = read().to(device)
        dist.broadcast(state, handles.tp_ranks[0], group=handles.tp_group)
        write(state.cpu())


def first_uneven_parameter(
    families: Mapping[nn.Parameter, ParameterInfo], handles: FoldingGroupHandles, device: torch.device
) -> str | None:
    """Name of the first parameter whose number of elements differs over the stage, or None. Collective over the stage."""
    sizes = torch.tensor([parameter.numel() for parameter in families], dtype=torch.int64, device=device)
    extremes = torch.stack([sizes, -sizes])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=handles.stage_group)
    uneven = (extremes[0] != -extremes[1]).tolist()
    return next((info.name for info, differs in zip(families.values(), uneven, strict=True) if differs), None)
