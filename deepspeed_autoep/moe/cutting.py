"""Cut experts' tensors into the ranks' parts and join them again, as :mod:`deepspeed_autoep.moe.weight_layout` says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_autoep.moe.weight_layout import ExpertShard, ExpertTensor


def cut_expert_tensor(value: torch.Tensor, tensor: ExpertTensor, shard: ExpertShard) -> torch.Tensor:
    """A copy of one rank's part of the full ``value``: shape ``shard.shape(tensor)``, contiguous, same dtype."""
    mine = value[shard.first : shard.last]
    if shard.etp_size == 1 or tensor.intermediate_dim is None:
        return mine.clone(memory_format=torch.contiguous_format)
    runs = tensor.runs(shard.etp_size, shard.etp_rank)
    return torch.cat([mine.narrow(tensor.intermediate_dim, start, stop - start) for start, stop in runs], tensor.intermediate_dim)


def join_etp_parts(parts: Sequence[torch.Tensor], tensor: ExpertTensor) -> torch.Tensor:
    """The ETP peers' parts of the same experts, in rank order -> those experts whole. Undoes :func:`cut_expert_tensor`."""
    dim = tensor.intermediate_dim
    if len(parts) == 1 or dim is None:
        return parts[0]
    halves = [part.chunk(tensor.halves, dim) for part in parts]
    return torch.cat([halves[rank][half] for half in range(tensor.halves) for rank in range(len(parts))], dim)
