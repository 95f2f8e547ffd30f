"""ZeRO-1/2 with the TP rule and the exact norm.

DeepSpeed's optimizer is built as it is, then the instance's class is swapped for :class:`FoldedZeroOptimizer`: its
hooks call methods through the instance, so overriding them is enough. Gradients are corrected in ``step()``, on this
rank's partition, after the reduction over data: once per optimizer step by construction, and 1/dp of the traffic.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from deepspeed_autoep.compat import DeepSpeedZeroOptimizer
from deepspeed_autoep.errors import UnsupportedError
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.gradients.norms import GradientNorm, global_gradient_norm
from deepspeed_autoep.gradients.reducer import TPGradientReducer
from deepspeed_autoep.gradients.slices import GradientSlice, ParameterInfo


class FoldedZeroOptimizer(DeepSpeedZeroOptimizer):
    """Overrides what differs under folding; made by :func:`fold_zero_optimizer`, never constructed."""

    autoep_handles: FoldingGroupHandles
    autoep_families: Mapping[torch.nn.Parameter, ParameterInfo]
    autoep_reducer: TPGradientReducer
    autoep_norm: GradientNorm | None = None  # of the step in progress

    def step(self, closure=None):
        if any(self.averaged_gradients.get(index) is None for index in range(len(self.bit16_groups))):
            raise UnsupportedError("step() was called without a backward pass since the last step")
        slices = list(self._autoep_slices())
        self.autoep_reducer.correct(slices)
        self.autoep_norm = global_gradient_norm(
            slices, self.autoep_handles.spec, self.autoep_handles.stage_group, self.single_partition_of_fp32_groups[0].device
        )
        del slices  # DeepSpeed frees gradients group by group while it steps
        try:
            super().step(closure)
        finally:
            self.autoep_norm = None

    def discard_gradients(self) -> None:
        """Forget what backward passes have left since the last step, reduced or not."""
        self.averaged_gradients = dict.fromkeys(self.averaged_gradients)
        self.all_grad_tensors = dict.fromkeys(self.all_grad_tensors)
        for group in self.bit16_groups:
            self.free_grad_in_param_list(group)

    def _autoep_slices(self):
        """This rank's partition as gradient pieces. DeepSpeed pads partitions at the end, behind the last parameter."""
        for index in range(len(self.bit16_groups)):
            pieces = [piece for piece in self.averaged_gradients[index] if not getattr(piece, "_zero_padding", False)]
            parameters = self.params_in_partition[index]
            if len(pieces) < len(parameters):
                raise UnsupportedError(f"parameter group {index} has {len(parameters)} parameters here and {len(pieces)} gradients")
            for piece, parameter in zip(pieces, parameters, strict=False):
                yield GradientSlice(piece.data, self.autoep_families[parameter], shards=self.partition_count[index])

    def has_overflow(self, partition_gradients=True) -> bool:
        """One decision for the stage: the norm is non-finite exactly when some rank's gradient is."""
        return not self.autoep_norm.is_finite

    def scaled_global_norm(self, norm_type=2) -> torch.Tensor:
        """Norm of the (loss-scaled) gradients, for the clipping and the report of DeepSpeed's step."""
        if norm_type != 2:
            raise UnsupportedError(f"norm_type={norm_type!r} is not supported: legal is 2")
        device = self.single_partition_of_fp32_groups[0].device
        value = self.autoep_norm.value if self.autoep_norm.is_finite else -1.0  # DeepSpeed's mark for "not finite"
        return torch.tensor(value, dtype=torch.float32, device=device)

    def allreduce_and_copy_with_multiple_ranks(
        self, small_bucket, communication_data_type, log=None, divide=True, process_group=None, bucket_ranks=None, output_bucket=None
    ):
        """A group of one rank (edp = 1) has nothing to reduce: DeepSpeed would copy its gradients three times over."""
        group = self.dp_process_group if process_group is None else process_group
        if dist.get_world_size(group) > 1 or divide:
            return super().allreduce_and_copy_with_multiple_ranks(
                small_bucket, communication_data_type, log, divide, process_group, bucket_ranks, output_bucket
            )
        for gradient, output in zip(small_bucket, output_bucket or [None] * len(small_bucket), strict=True):
            self._add_to_grad_partition_buffer(output, gradient)

    # contiguous_gradients=false: DeepSpeed averages every gradient over the dense group, experts too.

    def buffered_reduce_fallback(self, rank, grads, communication_data_type, elements_per_buffer=500000000, log=None):
        bucket = self.ipg_buckets[communication_data_type]
        for group, members in self._autoep_by_group(grads, bucket.params):
            for dtype_members in _by_dtype([grad for grad, _ in members]):
                torch._foreach_div_(dtype_members, dist.get_world_size(self.dp_process_group))
                self.allreduce_no_retain(
                    dtype_members,
                    communication_data_type,
                    numel_per_bucket=elements_per_buffer,
                    rank=rank,
                    log=log,
                    divide=False,
                    process_group=group,
                )

    def _allreduce_noncontiguous_bucket_preserving_fp32(self, grads, grad_params, communication_data_type):
        for group, members in self._autoep_by_group(grads, grad_params):
            chosen = [grad for grad, _ in members]
            torch._foreach_div_(chosen, dist.get_world_size(self.dp_process_group))
            self._autoep_reduce_over = group
            try:
                super()._allreduce_noncontiguous_bucket_preserving_fp32(
                    chosen, [place for _, place in members], communication_data_type
                )
            finally:
                self._autoep_reduce_over = None

    _autoep_reduce_over = None  # the group that the bucket being reduced belongs to, when the caller cannot pass it

    def allreduce_bucket(self, bucket, communication_data_type, rank=None, log=None, divide=True, process_group=None):
        if self._autoep_reduce_over is not None:
            divide, process_group = False, self._autoep_reduce_over
        return super().allreduce_bucket(
            bucket, communication_data_type, rank=rank, log=log, divide=divide, process_group=process_group
        )

    def _autoep_by_group(self, grads, places):
        """Split a bucket by the process group of each parameter group: dense first, on every rank."""
        kinds = {}
        for grad, place in zip(grads, places, strict=True):
            kinds.setdefault(self.is_moe_param_group[place[0]] if self.has_moe_layers else False, []).append((grad, place))
        return [(self.real_dp_process_group[kinds[kind][0][1][0]], kinds[kind]) for kind in sorted(kinds)]


def _by_dtype(tensors):
    kinds: dict[torch.dtype, list] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())


def fold_zero_optimizer(
    optimizer: DeepSpeedZeroOptimizer,
    handles: FoldingGroupHandles,
    families: Mapping[torch.nn.Parameter, ParameterInfo],
    reducer: TPGradientReducer,
    contiguous_gradients: bool,
) -> None:
    """Swap the class of a freshly built ZeRO-1/2 optimizer. Raises :class:`UnsupportedError` for any other type."""
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        raise UnsupportedError(f"optimizer {type(optimizer).__name__} is not supported: legal is ZeRO stage 1 or 2")
    optimizer.__class__ = FoldedZeroOptimizer
    optimizer.autoep_handles = handles
    optimizer.autoep_families = families
    optimizer.autoep_reducer = reducer
    optimizer.check_grad_overflow = True  # skip a non-finite step in every dtype; the norm knows already
    # DeepSpeed asserts true for MoE when it builds ZeRO-2; the paths above make false right.
    optimizer.contiguous_gradients = contiguous_gradients
