"""Do the lanes of a TP group agree on gradients that the family table calls REPLICATED?

Two questions. :class:`LaneDeviation`, on the first step: is the classification right? :class:`LaneVerifier`, every N
steps, for runs that do not average such gradients: are the lanes still the same, bit for bit?
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from deepspeed_autoep.errors import RankMismatchError
from deepspeed_autoep.folding.families import GradientFamily
from deepspeed_autoep.folding.groups import FoldingGroupHandles, all_gather_single
from deepspeed_autoep.gradients.slices import GradientSlice, ParameterInfo
from deepspeed_autoep.ops import Segments, choose_ops

# Share by which a lane's gradient may differ from the lanes' mean before a REPLICATED parameter counts as wrongly
# classified. Lanes compute the same thing, so they differ by rounding only.
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.2}
# Gradients below this share of the largest one are rounding noise, not evidence.
_NOISE_FLOOR = 1e-3
# Elements compared at a time: bounds the temporaries.
_CHUNK = 1 << 20


class LaneDeviation:
    """How far lanes are apart on REPLICATED parameters: a parameter that one lane's part feeds is not replicated.

    HF's tp_plan says which parameters have partial gradients; a plan that forgets one would be averaged, tp times too
    small, without a word. The first step's gradients show it.
    """

    def __init__(self, parameters: Sequence[ParameterInfo], handles: FoldingGroupHandles, device: torch.device) -> None:
        self.handles = handles
        self.parameters = parameters
        # Rows: squared deviation over tolerance squared, squared mean. float64 [2, parameters]
        self.sums = torch.zeros(2, len(parameters), dtype=torch.float64, device=device)

    def add(self, parameter: ParameterInfo, own: torch.Tensor, summed: torch.Tensor, factor: float, dtype: torch.dtype) -> None:
        """``own``: this lane's gradient; ``summed``: fp32, over the lanes; ``dtype`` the lane's backward pass computed in."""
        tolerance = _TOLERANCE.get(dtype, 1e-2)
        for mine, total in zip(own.view(-1).split(_CHUNK), summed.view(-1).split(_CHUNK), strict=True):
            mean = total * factor
            self.sums[0, parameter.index] += (mine.float() - mean).double().square().sum() / tolerance**2
            self.sums[1, parameter.index] += mean.double().square().sum()

    def raise_if_any(self) -> bool:
        """Collective over the stage; every rank raises the same error or none does. Whether all gradients were finite, so
        that the question is settled: others are the statistics' business (the step is skipped), and no evidence."""
        dist.all_reduce(self.sums, group=self.handles.stage_group)
        deviation, mean = self.sums.cpu()
        floor = _NOISE_FLOOR**2 * mean.nan_to_num(0.0, 0.0, 0.0).max()
        for index, parameter in enumerate(self.parameters):
            if torch.isfinite(deviation[index]) and deviation[index] > max(mean[index], floor):
                raise RankMismatchError(
                    f"the gradient of {parameter.name!r} differs between the lanes of a tensor-parallel group, so it is not "
                    "replicated: either one lane's shard alone feeds it (give a tensor_parallel.partition_config of the whole model "
                    'with {"partition_type": "skip", "grad_allreduce": true} for it), or the lanes were given different samples or '
                    "random states"
                )
        return bool(self.sums.isfinite().all())


class LaneVerifier:
    """Compares checksums of REPLICATED gradients over the lanes, every ``interval`` steps: 8 bytes a parameter on the wire."""

    def __init__(
        self, parameters: Sequence[ParameterInfo], handles: FoldingGroupHandles, device: torch.device, interval: int
    ) -> None:
        self.parameters = parameters
        self.handles = handles
        self.device = device
        self.interval = interval
        self.ops = choose_ops(torch.device(device))
        self.steps = 0

    @torch.no_grad()
    def after_step(self, slices: Sequence[GradientSlice]) -> None:
        """Lanes pass the same pieces. On a step whose number is a multiple of ``interval``, a collective over TP and the
        stage: every rank raises the same :class:`RankMismatchError` or none does."""
        self.steps += 1
        if self.steps % self.interval:
            return
        replicated = [piece for piece in slices if piece.parameter.family is GradientFamily.REPLICATED]
        none = len(self.parameters)
        first = torch.full((), none, dtype=torch.int64, device=self.device)
        if replicated:
            gradients = [piece.gradient for piece in replicated]
            mine = self.ops.checksums(Segments.of(gradients), gradients).to(self.device)
            everyone = mine.new_empty(self.handles.spec.tp_size * len(mine))
            all_gather_single(everyone, mine, group=self.handles.tp_group)
            differs = (everyone.view(-1, len(mine)) != mine).any(dim=0)
            indices = torch.tensor([piece.parameter.index for piece in replicated], device=self.device)
            first = torch.where(differs, indices, none).min()
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self.handles.stage_group)
        index = int(first.item())
        if index < none:
            raise RankMismatchError(
                f"the lanes of a tensor-parallel group have different gradients of {self.parameters[index].name!r} at step "
                f"{self.steps}, found by expert_parallel.replicated_gradient_sync='verify' (every {self.interval} steps). Either the "
                "lanes were given different samples or random states (validate_folding_routing=true finds the step), or kernels "
                "that do not give the same bits every time let them drift apart, which 'average' prevents"
            )
