"""``contiguous_gradients=false`` under ZeRO-1/2: DeepSpeed averages every gradient over the dense group, experts too.

A mixin for its optimizer that splits each bucket by process group and divides by dp, as the contiguous path does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class NoncontiguousReduction:
    _autoep_reduce_over = None  # the group that the bucket being reduced belongs to, when the caller cannot pass it

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

    def allreduce_bucket(self, bucket, communication_data_type, rank=None, log=None, divide=True, process_group=None):
        if self._autoep_reduce_over is not None:
            divide, process_group = False, self._autoep_reduce_over
        return super().allreduce_bucket(
            bucket, communication_data_type, rank=rank, log=log, divide=divide, process_group=process_group
        )

    def _autoep_by_group(self, grads, places):
        """Split a bucket by the process group of each parameter group: dense first, then experts by name, on every rank."""
        kinds = {}
        for grad, place in zip(grads, places, strict=True):
            expert = self.has_moe_layers and self.is_moe_param_group[place[0]]
            kinds.setdefault(self.optimizer.param_groups[place[0]]["name"] if expert else "", []).append((grad, place))
        return [(self.real_dp_process_group[members[0][1][0]], members) for _, members in sorted(kinds.items(), key=lambda it: it[0])]


def _by_dtype(tensors):
    kinds: dict[torch.dtype, list] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())
