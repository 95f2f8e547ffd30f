"""ZeRO-1/2 for a model of two dtypes: everything that happens to an fp32 parameter's gradient happens in fp32.

A mixin for DeepSpeed's optimizer. DeepSpeed takes one dtype, that of the first parameter, for all buckets, accumulators and
reductions. Parameter groups are of one dtype each, so masters, partitions and gathers need nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_autoep.compat import IPGBucket


@dataclass(frozen=True)
class MixedPrecision:
    """``low``: dtype of the parameters that are not fp32; ``loss_scaler``: DeepSpeed's for it."""

    low: torch.dtype
    loss_scaler: object


class MixedDtypeGradients:
    _autoep_mixed = False
    _autoep_fp32_elements: int  # of the bucket for fp32 gradients: no more than all of them

    def autoep_mix(self, precision: MixedPrecision) -> None:
        """After construction, which went by the first parameter's dtype, whichever of the two that was."""
        self._autoep_mixed = True
        if self.dtype != precision.low:
            self.dtype = precision.low
            self.use_separate_grad_accum = self.dtype != self.gradient_accumulation_dtype
            self.use_grad_accum_attribute = self.use_separate_grad_accum and not self.partition_gradients
            self.loss_scaler = precision.loss_scaler
            self.dynamic_loss_scale = self.loss_scaler.dynamic
            if self.use_grad_accum_attribute and not self._grad_acc_hooks:
                self.create_gradient_handling_hooks()
        self.ipg_buckets.setdefault(torch.float32, IPGBucket())
        reduced = [p for group in self.bit16_groups for p in group if self.get_param_comm_dtype(p) == torch.float32]
        self._autoep_fp32_elements = min(int(self.reduce_bucket_size), sum(parameter.numel() for parameter in reduced))

    def get_param_comm_dtype(self, param):
        if self._autoep_mixed and param.dtype == torch.float32:
            return torch.float32
        return super().get_param_comm_dtype(param)

    def setup_buckets(self):
        """The fp32 bucket holds fp32, also where bf16 gradients share it (``communication_data_type: fp32``)."""
        if not self._autoep_mixed or self.ready_for_gradients:
            return super().setup_buckets()
        bucket = self.ipg_buckets.pop(torch.float32)  # DeepSpeed would give it a buffer of the other's dtype and size
        try:
            super().setup_buckets()
        finally:
            self.ipg_buckets[torch.float32] = bucket
        if self.contiguous_gradients:
            device = get_accelerator().current_device_name()
            count = 2 if self.overlap_comm else 1
            bucket.buffer[:] = [torch.empty(self._autoep_fp32_elements, dtype=torch.float32, device=device) for _ in range(count)]
            bucket.index = 0

    def copy_grads_in_partition(self, param, group_idx=None):
        """Out of the bucket, which the next one overwrites. DeepSpeed's buffer for that is of one dtype."""
        index = self._get_param_group_idx(param) if group_idx is None else group_idx
        if not self._autoep_mixed or param.dtype == self.dtype or self._use_compact_grad_partition_buffer(index):
            return super().copy_grads_in_partition(param, group_idx)
        gradient = self.get_gradient_for_reduction(param)
        gradient.data = gradient.detach().clone()

    def get_all_grad_tensors(self, tensor_list, dtype):
        """A parameter without a gradient gets zeros, to which later backward passes add."""
        if not self._autoep_mixed:
            return super().get_all_grad_tensors(tensor_list, dtype)
        kinds = [torch.promote_types(dtype, parameter.dtype) for parameter in tensor_list]
        return [super(MixedDtypeGradients, self).get_all_grad_tensors([p], kind)[0] for p, kind in zip(tensor_list, kinds, strict=True)]

    def get_flat_partition(self, tensor_list, first_offset, partition_size, dtype, device, param_group_idx, return_tensor_list=False):
        """Paddings are of the gradients' dtype."""
        if self._autoep_mixed:
            dtype = torch.promote_types(dtype, self.bit16_groups[param_group_idx][0].dtype)
        return super().get_flat_partition(tensor_list, first_offset, partition_size, dtype, device, param_group_idx, return_tensor_list)
