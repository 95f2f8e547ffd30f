"""What the reducer and the statistics work on: pieces of gradients, each with its family. Pure but for holding tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_autoep.folding.families import FAMILY_RULES, GradientFamily
from deepspeed_autoep.folding.spec import ParallelFoldingSpec


@dataclass(frozen=True)
class ParameterInfo:
    """A trainable parameter as the gradient rules see it. ``index`` counts parameters in the model's order, the same
    on every rank; ``group`` is the user's optimizer group that holds it, or None."""

    index: int
    name: str
    family: GradientFamily
    group: int | None = 0


@dataclass(frozen=True)
class GradientSlice:
    """One rank's contiguous piece of one parameter's gradient (or of the parameter itself).

    ``shards`` is how many ranks of the data group hold different pieces: the partition count under ZeRO-1/2, 1 where
    each rank holds the whole gradient.
    """

    gradient: torch.Tensor
    parameter: ParameterInfo
    shards: int
    dtype: torch.dtype | None = None  # that the backward pass computed in, where it is not the gradient's
    factor: float = 1.0  # that the values must still be multiplied by

    @property
    def computed_in(self) -> torch.dtype:
        return self.dtype or self.gradient.dtype

    def norm_weight(self, spec: ParallelFoldingSpec) -> float:
        """Weight of this piece in a sum over the ranks of the stage: each element counts once."""
        return self.shards / FAMILY_RULES[self.parameter.family].replicas(spec)


@dataclass(frozen=True)
class FlatGradients:
    """Pieces that are views of one contiguous fp32 buffer, in ascending order of place. What lies between and behind
    them (DeepSpeed's padding) is zero."""

    buffer: torch.Tensor
    pieces: tuple[GradientSlice, ...]

    def offsets(self) -> tuple[int, ...]:
        base = self.buffer.storage_offset()
        return tuple(piece.gradient.storage_offset() - base for piece in self.pieces)
