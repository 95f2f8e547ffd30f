"""Which part of each parameter and buffer a rank holds, and which ranks hold the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from deepspeed_autoep.checkpoint.slices import Cut, Runs
from deepspeed_autoep.compat import autotp_cut
from deepspeed_autoep.errors import CheckpointError
from deepspeed_autoep.folding.families import is_tp_sharded_parameter
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.moe.discovery import ExpertsSite
from deepspeed_autoep.moe.layer import AutoEPMoELayer
from deepspeed_autoep.moe.weight_layout import ExpertShard, ExpertTensor
from deepspeed_autoep.peft_adapters import ExpertAdapter, expert_adapters
from deepspeed_autoep.quantization import describe_buffers
from deepspeed_autoep.tensor_parallel import PartitionPlan


@dataclass(frozen=True)
class Placement:
    """``holders``: ranks that hold the same elements: "stage", "dense_dp", "edp", "expert_shared" (EDP x ETP), or "etp_rank", those of
    one ETP rank. ``name``: in the whole model, where the module's own counts this rank's experts from 0."""

    cut: Cut
    holders: str
    name: str | None = None

    def replica(self, handles: FoldingGroupHandles, rank: int) -> tuple[int, int]:
        """``rank``'s place among the holders, and how many there are."""
        if self.holders == "etp_rank":
            ranks = handles.stage_ranks[handles.etp_rank :: handles.spec.etp_size]
        else:
            ranks = getattr(handles, f"{self.holders}_ranks")
        return ranks.index(rank), len(ranks)


def placements(model: nn.Module, sites: list[ExpertsSite], plan: PartitionPlan, handles: FoldingGroupHandles) -> dict[torch.Tensor, Placement]:
    """Of every parameter that is cut, and of the buffers of experts' quantizers. Raises :class:`CheckpointError` for a layer whose cut is not known."""
    found: dict[torch.Tensor, Placement] = {}
    for module in model.modules():
        if isinstance(module, AutoEPMoELayer):
            for tensor in module.autoep.layout.tensors:
                found[getattr(module, tensor.name)] = _of_expert(expert_cut(tensor, module.autoep.shard), tensor)
            found |= _of_quantizers(module)
    for site in sites:
        for adapter in expert_adapters(model, site):
            found[adapter.parameter] = _of_expert(_adapter_cut(adapter, site.module.autoep.shard), adapter.tensor)
    for name in plan.cut_parameters:
        parameter = model.get_parameter(name)
        size = parameter.shape[0]
        run = ((size * handles.tp_rank, size * (handles.tp_rank + 1)),)
        found[parameter] = Placement(Cut.along((size * handles.spec.tp_size, *parameter.shape[1:]), {0: run}), "dense_dp")
    for name, parameter in model.named_parameters():
        if parameter not in found and is_tp_sharded_parameter(parameter):
            found[parameter] = Placement(_dense_cut(name, parameter, handles.tp_rank), "dense_dp")
    for name, parameter in model.named_parameters():
        if parameter in found and found[parameter].cut.local_shape != tuple(parameter.shape):
            raise CheckpointError(
                f"parameter {name!r} has shape {list(parameter.shape)} on this rank, its cut gives {list(found[parameter].cut.local_shape)}"
            )
    return found


def _of_quantizers(module: AutoEPMoELayer) -> dict[torch.Tensor, Placement]:
    """Values of one expert are cut as it is; those that all experts share are whole on every EP rank."""
    found = {}
    for buffer, part in zip(getattr(module, "autoep_quantizers", ()), describe_buffers(module), strict=True):
        shard = module.autoep.shard
        cut_by_etp = shard.etp_size > 1 and buffer.layout.runs(replace(shard, etp_rank=0)) != buffer.layout.runs(replace(shard, etp_rank=1))
        whole, cut = ("stage", "etp_rank") if part.shared else ("expert_shared", "edp")
        found[module.get_buffer(buffer.name)] = Placement(Cut(part.shape, part.runs), cut if cut_by_etp else whole, part.name)
    return found


def _of_expert(cut: Cut, tensor: ExpertTensor) -> Placement:
    return Placement(cut, "expert_shared" if tensor.intermediate_dim is None else "edp")


def expert_cut(tensor: ExpertTensor, shard: ExpertShard) -> Cut:
    """Of a stacked tensor ``[E, ...]``."""
    cuts: dict[int, Runs] = {0: ((shard.first, shard.last),)}
    if tensor.intermediate_dim is not None:
        cuts[tensor.intermediate_dim] = tensor.runs(shard.etp_size, shard.etp_rank)
    return Cut.along(tensor.shape, cuts)


def _adapter_cut(adapter: ExpertAdapter, shard: ExpertShard) -> Cut:
    """Of LoRA's matrix as PEFT stores it: A ``[E r, in]``, B ``[out, r E]`` with E the fastest."""
    experts, first, second = adapter.tensor.shape
    runs = adapter.tensor.runs(shard.etp_size, shard.etp_rank)
    if adapter.tensor.name == "lora_A":
        cuts: dict[int, Runs] = {0: ((shard.first * first, shard.last * first),)}
        return Cut.along((experts * first, second), cuts | ({1: runs} if runs else {}))
    cuts = {1: tuple((rank * experts + shard.first, rank * experts + shard.last) for rank in range(second))}
    return Cut.along((first, experts * second), cuts | ({0: runs} if runs else {}))


def _dense_cut(name: str, parameter: torch.Tensor, tp_rank: int) -> Cut:
    """Of a parameter that AutoTP has cut: rows or columns of a matrix, perhaps of several that it is made of."""
    known = autotp_cut(parameter)
    if known is None:
        raise CheckpointError(f"parameter {name!r} is a tensor-parallel shard whose cut AutoTP does not describe: it cannot be saved")
    logical, dim = known.logical_shape, known.dim
    runs, start = [], 0
    for widths in known.widths:
        first = start + sum(widths[:tp_rank])
        runs.append((first, first + widths[tp_rank]))
        start += sum(widths)
    if dim == len(logical) - 1 and len(known.shape) > 1:
        return Cut.along(known.shape, {len(known.shape) - 1: tuple(runs)})
    # Leading dimensions of AutoTP's view are the matrix's rows.
    inner, outer = prod(logical[dim + 1 : max(dim + 1, len(logical) - 1)]), prod(logical[:dim])
    size = logical[dim]
    rows = tuple(((block * size + low) * inner, (block * size + high) * inner) for block in range(outer) for low, high in runs)
    return Cut.along(known.shape, {0: rows})
