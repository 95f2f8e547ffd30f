"""Gradient statistics, exact under every folding: one pass over the gradients, one all-reduce of a small vector.

``norm**2`` = sum over ranks of (own pieces' sum of squares / ranks that hold the same element), see
:mod:`deepspeed_autoep.folding.families`; counts are weighted alike. A non-finite gradient on any rank is seen by all, so
that all skip the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from deepspeed_autoep.folding.families import GradientFamily
from deepspeed_autoep.folding.spec import ParallelFoldingSpec
from deepspeed_autoep.gradients.slices import GradientSlice, ParameterInfo
from deepspeed_autoep.ops import Segments, choose_ops

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class GradientStatistics:
    """Of the whole model's gradient after all reductions and before clipping; the same bits on every rank of the stage.

    ``norm``: L2. ``family_norms``: L2 by family that the model has (values of :class:`GradientFamily`). ``group_norms``: L2 by the user's optimizer group, in their order. ``zeros``: elements that are exactly zero.
    ``parameter_norm``: L2 of the trainable parameters before the step, None unless asked for. ``is_finite``: whether every
    element of the gradient is.
    """

    norm: float
    family_norms: Mapping[str, float]
    group_norms: tuple[float, ...]
    zeros: int
    parameter_norm: float | None
    is_finite: bool

    def clip_factor(self, max_norm: float) -> float:
        """``max_norm / (norm + 1e-6)``, never above 1; 1 when ``max_norm`` is 0 (clipping off)."""
        return min(1.0, max_norm / (self.norm + CLIP_EPSILON)) if max_norm > 0 else 1.0

    def unscaled(self, loss_scale: float) -> GradientStatistics:
        """Those of the gradient of the loss, from those of ``loss_scale`` times the loss."""
        return replace(
            self,
            norm=self.norm / loss_scale,
            family_norms={family: norm / loss_scale for family, norm in self.family_norms.items()},
            group_norms=tuple(norm / loss_scale for norm in self.group_norms),
        )


class StatisticsPass:
    """Computes :class:`GradientStatistics`. What depends on the composition only is computed once."""

    def __init__(
        self, spec: ParallelFoldingSpec, stage_group, device: torch.device, parameters: Sequence[ParameterInfo], groups: int
    ) -> None:
        """``parameters``: the model's trainable ones; ``groups``: number of the user's optimizer groups."""
        self.spec = spec
        self.stage_group = stage_group
        self.device = torch.device(device)
        self.ops = choose_ops(self.device)
        self.families = tuple(family for family in GradientFamily if any(info.family is family for info in parameters))
        self.groups = groups
        self.last: GradientStatistics | None = None  # of the last call, for the gradient of the loss itself
        self._weights: dict[tuple, tuple[Segments, torch.Tensor]] = {}

    @torch.no_grad()
    def __call__(
        self, gradients: Sequence[GradientSlice], parameters: Sequence[GradientSlice] | None = None, loss_scale: float = 1.0
    ) -> GradientStatistics:
        """Collective over the stage.

        ``gradients``: this rank's pieces, contiguous, of ``loss_scale`` times the loss: the result is theirs.
        ``parameters``: this rank's pieces of the parameters, for their norm.
        """
        squares, zeros = self._cells(gradients)
        cells = [squares, zeros[:1], (~squares.isfinite().all()).to(torch.float64).reshape(1)]
        if parameters is not None:
            cells.append(self._cells(parameters)[0][:1])
        vector = torch.cat(cells)
        dist.all_reduce(vector, group=self.stage_group)
        values = vector.tolist()
        norms = [_root(value) for value in values[: len(squares)]]
        zero_count, broken, *parameter_squares = values[len(squares) :]
        first_group = 1 + len(self.families)
        statistics = GradientStatistics(
            norm=norms[0],
            family_norms={family.value: norm for family, norm in zip(self.families, norms[1:first_group], strict=True)},
            group_norms=tuple(norms[first_group:]),
            zeros=round(zero_count),
            parameter_norm=_root(parameter_squares[0]) if parameter_squares else None,
            is_finite=broken == 0,
        )
        self.last = statistics.unscaled(loss_scale)
        return statistics

    def _cells(self, slices: Sequence[GradientSlice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Weighted sums of squares and weighted zeros, fp64 [1 + families + groups] each: of all, by family, by group."""
        counts = [piece.gradient.numel() for piece in slices]
        if 0 in counts:
            slices = [piece for piece, count in zip(slices, counts, strict=True) if count]
        key = tuple([(piece.parameter.index, piece.shards, piece.factor, count) for piece, count in zip(slices, filter(None, counts), strict=True)])
        if key not in self._weights:
            self._weights[key] = self._prepare(slices)
        segments, weights = self._weights[key]
        if not slices:
            empty = torch.zeros(weights.shape[1], dtype=torch.float64, device=self.device)
            return empty, empty
        sums = self.ops.squares_and_zeros(segments, [piece.gradient for piece in slices]).to(self.device)
        # where, not a product: 0 * inf would carry one family's overflow into all.
        weighted = torch.where(weights != 0, weights * sums[:, None, :], 0.0).sum(dim=2)  # [2, cells]
        return weighted[0], weighted[1]

    def _prepare(self, slices: Sequence[GradientSlice]) -> tuple[Segments, torch.Tensor]:
        first_group = 1 + len(self.families)
        weights = torch.zeros(2, first_group + self.groups, len(slices), dtype=torch.float64)  # of squares, of zeros
        for column, piece in enumerate(slices):
            rows = [0, 1 + self.families.index(piece.parameter.family)]
            if piece.parameter.group is not None:
                rows.append(first_group + piece.parameter.group)
            weights[0, rows, column] = piece.norm_weight(self.spec) * piece.factor**2
            weights[1, rows, column] = piece.norm_weight(self.spec)
        return Segments.of([piece.gradient for piece in slices]), weights.to(self.device)


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else value  # nan >= 0 is false: it passes through
