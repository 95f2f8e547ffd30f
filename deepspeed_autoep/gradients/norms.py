"""The global gradient norm, exact under every folding: one all-reduce of one number over the stage.

``norm**2`` = sum over ranks of (own pieces' sum of squares / ranks that hold the same element), see
:mod:`deepspeed_autoep.folding.families`. A non-finite gradient anywhere makes the sum non-finite everywhere, so all
ranks take the same decision to skip the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed_autoep.folding.spec import ParallelFoldingSpec
from deepspeed_autoep.gradients.slices import GradientSlice

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


# Elements whose squares are summed in fp32; longer sums lose digits (3e-6 of the norm at a million elements on CPU).
_CHUNK = 1 << 10


def sum_of_squares(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim fp64: squares are summed in fp32 within chunks, chunks in fp64."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // _CHUNK * _CHUNK
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _CHUNK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return norms.to(torch.float64).square().sum() + rest.to(torch.float64).square()


@dataclass(frozen=True)
class GradientNorm:
    """The same bits on every rank of the stage."""

    value: float  # inf or nan when a gradient is not finite

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value)

    def clip_factor(self, max_norm: float) -> float:
        """``max_norm / (norm + 1e-6)``, never above 1; 1 when ``max_norm`` is 0 (clipping off)."""
        return min(1.0, max_norm / (self.value + CLIP_EPSILON)) if max_norm > 0 else 1.0


@torch.no_grad()
def global_gradient_norm(slices: Iterable[GradientSlice], spec: ParallelFoldingSpec, stage_group, device) -> GradientNorm:
    """L2 norm of the gradient of the whole model."""
    squares, weights = [], []
    for piece in slices:
        if piece.gradient.numel():
            squares.append(sum_of_squares(piece.gradient))
            weights.append(piece.norm_weight(spec))
    total = torch.zeros(1, dtype=torch.float64, device=device)
    if squares:
        stacked = torch.stack(squares)
        total += (stacked * torch.tensor(weights, dtype=torch.float64, device=stacked.device)).sum()
    dist.all_reduce(total, group=stage_group)
    return GradientNorm(math.sqrt(value) if (value := total.item()) >= 0 else value)
