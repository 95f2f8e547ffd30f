"""Check that the lanes of every TP group hold the same data, with one small all-gather over the stage.

Every rank sees every checksum, so every rank takes the same decision: all raise, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_autoep.errors import RankMismatchError
from deepspeed_autoep.folding.groups import all_gather_single
from deepspeed_autoep.folding.spec import ParallelFoldingSpec

_INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio as a signed int64: spreads positions over all bits


# Elements hashed at a time: a few int64 temporaries of 2 MiB, within a cache.
_CHUNK = 1 << 18


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One int64 over shapes and bits of ``tensors``; order matters. Wraps modulo 2**64."""
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    for position, tensor in enumerate(tensors):
        shape = sum((size + 1) * 31**axis for axis, size in enumerate(tensor.shape))
        total = total * 1_000_003 + _hash_bits(tensor).to(device) + shape + position
    return total


def _hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the elements' bits, each times an odd number that its position decides."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.to(torch.uint8) if flat.dtype == torch.bool else flat.view(_INTEGER_OF_BYTES[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + part.numel(), device=bits.device, dtype=torch.int64) * _MIX
        total += ((part + 1) * (weights | 1)).sum()
    return total


def assert_lanes_agree(what: str, tensors: Sequence[torch.Tensor], spec: ParallelFoldingSpec, stage_group, remedy: str) -> None:
    """Raise :class:`RankMismatchError` on every rank of the stage if lanes of one TP group differ in ``tensors``."""
    mine = checksum(tensors).reshape(1)
    everyone = mine.new_empty(spec.stage_size)
    all_gather_single(everyone, mine, group=stage_group)
    by_group = everyone.view(spec.dp_size, spec.tp_size)
    differing = (by_group != by_group[:, :1]).any(dim=1).nonzero().flatten().tolist()
    if differing:
        first = differing[0] * spec.tp_size
        raise RankMismatchError(
            f"the lanes of a tensor-parallel group must hold the same {what}, but stage ranks "
            f"{list(range(first, first + spec.tp_size))} differ ({len(differing)} of {spec.dp_size} TP groups do). {remedy}"
        )
