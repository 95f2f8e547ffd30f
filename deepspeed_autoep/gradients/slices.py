"""What the reducer and the norm work on: pieces of gradients, each with its family. Pure but for holding tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_autoep.folding.families import FAMILY_RULES, GradientFamily
from deepspeed_autoep.folding.spec import ParallelFoldingSpec


@dataclass(frozen=True)
class ParameterInfo:
    """A trainable parameter as the gradient rules see it. ``index`` counts parameters in the model's order, the same
    on every rank."""

    index: int
    name: str
    family: GradientFamily


@dataclass(frozen=True)
class GradientSlice:
    """One rank's piece of one parameter's gradient after the reduction over data.

    ``shards`` is how many ranks of the data group hold different pieces: the partition count under ZeRO-1/2, 1 where
    each rank holds the whole gradient.
    """

    gradient: torch.Tensor
    parameter: ParameterInfo
    shards: int

    def norm_weight(self, spec: ParallelFoldingSpec) -> float:
        """Weight of this piece's sum of squares in a sum over the ranks of the stage: each element counts once."""
        return self.shards / FAMILY_RULES[self.parameter.family].replicas(spec)
