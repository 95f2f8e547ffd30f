"""The TP rule of the family table, applied to all of a step's gradients at once.

Runs after the reduction over data (it is linear, so the order does not matter, and a ZeRO partition is 1/dp of the
traffic). Gradients that meet their TP peers are packed into one fp32 buffer, summed by one all-reduce, scaled by
their family's factor and written back in their own dtype; expert gradients are scaled in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from deepspeed_autoep.errors import RankMismatchError
from deepspeed_autoep.folding.families import FAMILY_RULES, GradientFamily
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.gradients.slices import GradientSlice, ParameterInfo

# Elements packed for one collective: bounds the extra memory (fp32) to 256 MiB.
BUCKET_ELEMENTS = 64 * 1024 * 1024
# Share by which a lane's gradient may differ from the lanes' mean before a REPLICATED parameter counts as wrongly
# classified. Lanes compute the same thing, so they differ by rounding only.
_LANE_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.2}
# Gradients below this share of the largest one are rounding noise, not evidence.
_NOISE_FLOOR = 1e-3


class TPGradientReducer:
    """Corrects one rank's gradient pieces over its TP group. Lanes must pass the same pieces in the same order."""

    def __init__(
        self,
        handles: FoldingGroupHandles,
        parameters: Sequence[ParameterInfo],
        device: torch.device,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self.handles = handles
        self.device = device  # of the stage's collectives
        self.parameters = parameters  # of the whole model, in order
        self.bucket_elements = bucket_elements
        self.verify_next = handles.spec.tp_size > 1  # check the classification once, on the first gradients

    @torch.no_grad()
    def correct(self, slices: Sequence[GradientSlice]) -> None:
        """Apply the TP rule to every piece, in place. Call once per optimizer step."""
        if self.handles.spec.tp_size == 1:
            return
        self._cancel_expert_factor(slices)
        met = [piece for piece in slices if piece.parameter.family.meets_tp_peers and piece.gradient.numel()]
        deviation = _LaneDeviation(self.parameters, self.handles, self.device) if self.verify_next else None
        for bucket in _buckets(met, self.bucket_elements):
            self._reduce_bucket(bucket, deviation)
        if deviation is not None:
            self.verify_next = False
            deviation.raise_if_any()

    def _cancel_expert_factor(self, slices: Sequence[GradientSlice]) -> None:
        for family in (GradientFamily.EXPERT, GradientFamily.EXPERT_SHARED_ETP):
            gradients = [piece.gradient for piece in slices if piece.parameter.family is family]
            if gradients:
                torch._foreach_mul_(gradients, FAMILY_RULES[family].tp_factor(self.handles.spec.tp_size))

    def _reduce_bucket(self, bucket: list[GradientSlice], deviation: _LaneDeviation | None) -> None:
        packed = torch.cat([piece.gradient.reshape(-1).to(torch.float32) for piece in bucket])
        own = packed.clone() if deviation is not None else None
        dist.all_reduce(packed, group=self.handles.tp_group)
        start = 0
        for piece in bucket:
            stop = start + piece.gradient.numel()
            summed = packed[start:stop]
            summed.mul_(FAMILY_RULES[piece.parameter.family].tp_factor(self.handles.spec.tp_size))
            if deviation is not None and piece.parameter.family is GradientFamily.REPLICATED:
                deviation.add(piece.parameter, own[start:stop], summed, piece.gradient.dtype)
            piece.gradient.copy_(summed.view(piece.gradient.shape))
            start = stop


def _buckets(slices: Sequence[GradientSlice], limit: int) -> list[list[GradientSlice]]:
    """Consecutive pieces up to ``limit`` elements; a larger piece is alone."""
    buckets: list[list[GradientSlice]] = []
    filled = 0
    for piece in slices:
        size = piece.gradient.numel()
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(piece)
        filled += size
    return buckets


class _LaneDeviation:
    """How far lanes are apart on REPLICATED parameters: a parameter that one lane's part feeds is not replicated.

    HF's tp_plan says which parameters have partial gradients; a plan that forgets one would be averaged, tp times too
    small, without a word. The first step's gradients show it.
    """

    def __init__(self, parameters: Sequence[ParameterInfo], handles: FoldingGroupHandles, device: torch.device) -> None:
        self.handles = handles
        self.parameters = parameters
        # Rows: squared deviation over tolerance squared, squared mean. float64 [2, parameters]
        self.sums = torch.zeros(2, len(parameters), dtype=torch.float64, device=device)

    def add(self, parameter: ParameterInfo, own: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype) -> None:
        tolerance = _LANE_TOLERANCE.get(dtype, 1e-2)
        self.sums[0, parameter.index] += (own - mean).double().square().sum() / tolerance**2
        self.sums[1, parameter.index] += mean.double().square().sum()

    def raise_if_any(self) -> None:
        """Collective over the stage; every rank raises the same error or none does."""
        dist.all_reduce(self.sums, group=self.handles.stage_group)
        deviation, mean = self.sums.cpu()
        # A non-finite gradient is the norm's business (the step is skipped), not evidence of a wrong family.
        floor = _NOISE_FLOOR**2 * mean.nan_to_num(0.0, 0.0, 0.0).max()
        for index, parameter in enumerate(self.parameters):
            if torch.isfinite(deviation[index]) and deviation[index] > max(mean[index], floor):
                raise RankMismatchError(
                    f"the gradient of {parameter.name!r} differs between the lanes of a tensor-parallel group, so it is not "
                    "replicated: either one lane's shard alone feeds it (give a tensor_parallel.partition_config of the whole model "
                    'with {"partition_type": "skip", "grad_allreduce": true} for it), or the lanes were given different samples or '
                    "random states"
                )
