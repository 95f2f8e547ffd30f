"""One optimizer step's work on this rank's gradients: the TP rule, the lanes' agreement, the statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.gradients.lanes import LaneVerifier
from deepspeed_autoep.gradients.norms import GradientStatistics, StatisticsPass
from deepspeed_autoep.gradients.reducer import TPGradientReducer
from deepspeed_autoep.gradients.slices import FlatGradients, GradientSlice, ParameterInfo

# A flat buffer of fewer elements is packed with others rather than summed by a collective of its own.
_SMALL_FLAT = 256 * 1024


class GradientSync:
    """What the engine and its optimizers share. ``families``: the model's trainable parameters, in its order."""

    def __init__(
        self,
        handles: FoldingGroupHandles,
        families: Mapping[torch.nn.Parameter, ParameterInfo],
        device: torch.device,
        groups: int,
        *,
        replicated: Literal["average", "verify", "off"] = "average",
        verify_interval: int = 100,
        parameter_norm: bool = False,
        computed_in: torch.dtype | None = None,
    ) -> None:
        """``computed_in``: dtype of the backward pass, where it is not each parameter's own."""
        parameters = list(families.values())
        self.handles = handles
        self.families = families
        self.parameter_norm = parameter_norm
        self.computed_in = computed_in
        self.reducer = TPGradientReducer(handles, parameters, device, synchronize_replicated=replicated == "average")
        self.statistics = StatisticsPass(handles.spec, handles.stage_group, device, parameters, groups)
        verifies = replicated == "verify" and handles.spec.tp_size > 1
        self.verifier = LaneVerifier(parameters, handles, device, verify_interval) if verifies else None

    def slice_of(self, tensor: torch.Tensor, parameter: torch.nn.Parameter, shards: int = 1) -> GradientSlice:
        return GradientSlice(tensor, self.families[parameter], shards, self.computed_in or parameter.dtype)

    def correct(
        self, pieces: Sequence[GradientSlice], flats: Sequence[FlatGradients] = (), leave_factors: bool = False
    ) -> list[float]:
        """The TP rule. ``pieces`` are tensors of their own, ``flats`` buffers; each gradient once in a step.

        Returns for each flat buffer what it must still be multiplied by: 1 without ``leave_factors``.
        """
        loose, left = list(pieces), []
        for flat in flats:
            if len(flats) > 1 and flat.buffer.numel() < _SMALL_FLAT:
                loose += flat.pieces
                left.append(1.0)
            else:
                left.append(self.reducer.correct_flat(flat, leave_factors))
        self.reducer.correct(loose)
        return left

    def finish(
        self, gradients: Sequence[GradientSlice], parameters: Sequence[GradientSlice] | None = None, loss_scale: float = 1.0
    ) -> GradientStatistics:
        """After the last correction of a step. Collective over the stage.

        Raises :class:`deepspeed_autoep.errors.RankMismatchError`, on every rank, where lanes differ that must not.
        """
        self.reducer.finish_step()
        statistics = self.statistics(gradients, parameters, loss_scale)
        if self.verifier is not None:
            self.verifier.after_step(gradients if statistics.is_finite else [])  # NaNs have many forms
        return statistics
