"""ZeRO-1/2 with the TP rule and the exact norm.

DeepSpeed's optimizer is built as it is, then the instance's class is swapped for :class:`FoldedZeroOptimizer`: its
hooks call methods through the instance, so overriding them is enough. The TP rule is linear, so it may run in either of
two places, once per optimizer step:

- ``partition``: in ``step()``, on this rank's partition, after the reduction over data: 1/dp of the traffic, in one go;
- ``bucket``: on each of DeepSpeed's buckets when it is full, before the reduction over data, on the same stream: with
  ``overlap_comm`` that runs beside the backward pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_autoep.compat import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed_autoep.engine.zero_dtypes import MixedDtypeGradients, MixedPrecision
from deepspeed_autoep.engine.zero_noncontiguous import NoncontiguousReduction
from deepspeed_autoep.errors import UnsupportedError
from deepspeed_autoep.gradients.norms import GradientStatistics
from deepspeed_autoep.gradients.slices import FlatGradients, GradientSlice
from deepspeed_autoep.gradients.sync import GradientSync
from deepspeed_autoep.ops import Segments


class FoldedZeroOptimizer(MixedDtypeGradients, NoncontiguousReduction, DeepSpeedZeroOptimizer):
    """Overrides what differs under folding; made by :func:`fold_zero_optimizer`, never constructed."""

    autoep_sync: GradientSync
    autoep_place: str  # "partition" | "bucket"
    _autoep_place_now: str | None = None  # of the step in progress, from its first bucket on
    _autoep_statistics: GradientStatistics | None = None  # of the step in progress
    _autoep_factor: float = 1.0  # of the step in progress: clipping over loss scale

    def step(self, closure=None):
        if any(self.averaged_gradients.get(index) is None for index in range(len(self.bit16_groups))):
            raise UnsupportedError("step() was called without a backward pass since the last step")
        if self.autoep_folding_spec is not None:
            raise UnsupportedError("DeepSpeed's own TP correction was switched on: gradients would be corrected twice")
        try:
            self._autoep_prepare_step()
            super().step(closure)
        except BaseException:
            self.discard_gradients()  # half corrected: another step() must not take them
            raise
        finally:
            self._autoep_statistics = self._autoep_place_now = None

    def _autoep_prepare_step(self) -> None:
        # Address of a flat gradient -> its group, and what it must still be multiplied by.
        self._autoep_left: dict[int, tuple[int, float]] = {}
        gradients = self._autoep_corrected()
        parameters = list(self._autoep_masters()) if self.autoep_sync.parameter_norm else None
        scale = self.loss_scale  # of the backward pass: DeepSpeed's step may change it before it unscales
        self._autoep_statistics = self.autoep_sync.finish(gradients, parameters, scale)
        self._autoep_factor = self.autoep_sync.statistics.last.clip_factor(self.clip_grad) / scale

    def unscale_and_clip_grads(self, grad_groups_flat, total_norm):
        """One multiplication for clipping, the loss scale, and what the TP rule has left."""
        for gradient in grad_groups_flat:
            _, left = self._autoep_left.pop(gradient.data_ptr(), (None, 1.0))
            if (factor := self._autoep_factor * left) != 1.0:
                gradient.data.mul_(factor)

    def _optimizer_step(self, group_no):
        if any(group == group_no for group, _ in self._autoep_left.values()):
            raise UnsupportedError(f"DeepSpeed's step took the gradients of parameter group {group_no} in a form unknown to this version")
        super()._optimizer_step(group_no)

    def discard_gradients(self) -> None:
        """Forget what backward passes have left since the last step, reduced or not."""
        self._autoep_place_now = None
        self.autoep_sync.reducer.forget()
        self.averaged_gradients = dict.fromkeys(self.averaged_gradients)
        self.all_grad_tensors = dict.fromkeys(self.all_grad_tensors)
        for group in self.bit16_groups:
            self.free_grad_in_param_list(group)

    # The TP rule on the own partition

    def _autoep_corrected(self) -> list[GradientSlice]:
        """This rank's gradients, corrected here unless their buckets were."""
        here = self._autoep_place_now != "bucket"
        flats: dict[int, FlatGradients] = {}
        loose: list[GradientSlice] = []
        for index in range(len(self.bit16_groups)):
            if here and self._autoep_all_meet_peers(index):
                flats[index] = self._autoep_flat(index)
            else:
                loose += [piece for _, piece in self._autoep_pieces(index)]
        if here:
            # step() multiplies each flat gradient once more, as long as it takes the buffer itself and no cast of it.
            kept = all(partition.dtype == torch.float32 for partition in self.single_partition_of_fp32_groups)
            left = self.autoep_sync.correct(loose, list(flats.values()), leave_factors=kept)
            for (index, flat), factor in zip(flats.items(), left, strict=True):
                if factor != 1.0:
                    self._autoep_left[flat.buffer.data_ptr()] = (index, factor)
                loose += [replace(piece, factor=factor) for piece in flat.pieces]
        return loose

    def _autoep_all_meet_peers(self, index: int) -> bool:
        families = self.autoep_sync.families
        return self.autoep_sync.handles.spec.tp_size > 1 and all(
            families[parameter].family.meets_tp_peers for parameter in self.bit16_groups[index]
        )

    def _autoep_pieces(self, index: int) -> list[tuple[int, GradientSlice]]:
        """A group's gradients on this rank, each with its place in the partition."""
        gradients = self.averaged_gradients[index]
        parameters = iter(self.params_in_partition[index])
        pieces, place = [], 0
        for position, gradient in enumerate(gradients):
            if not getattr(gradient, "_zero_padding", False):
                parameter = next(parameters, None)
                if parameter is None:  # padding behind the last parameter
                    break
                if not gradient.is_contiguous():
                    gradient = gradients[position] = gradient.contiguous()
                pieces.append((place, self.autoep_sync.slice_of(gradient.data, parameter, self.partition_count[index])))
            place += gradient.numel()
        if next(parameters, None) is not None:
            raise UnsupportedError(
                f"parameter group {index} has {len(self.params_in_partition[index])} parameters here and {len(pieces)} gradients"
            )
        return pieces

    def _autoep_flat(self, index: int) -> FlatGradients:
        """A group's partition as one fp32 buffer. Where DeepSpeed has none yet, made here, earlier than it would."""
        if getattr(self.averaged_gradients[index], "flat_partition", None) is None:
            self._autoep_flatten(index)
        buffer = self.averaged_gradients[index].flat_partition
        return FlatGradients(buffer, tuple(piece for _, piece in self._autoep_pieces(index)))

    def _autoep_flatten(self, index: int) -> None:
        pieces = self._autoep_pieces(index)
        tensors = [piece.gradient for _, piece in pieces]
        buffer = torch.zeros(int(self.partition_size[index]), dtype=torch.float32, device=get_accelerator().current_device_name())
        self.autoep_sync.reducer.ops.pack(Segments.of(tensors, [place for place, _ in pieces]), tensors, buffer)
        views = list(buffer.split([gradient.numel() for gradient in self.averaged_gradients[index]]))
        for view, gradient in zip(views, self.averaged_gradients[index], strict=True):
            if getattr(gradient, "_zero_padding", False):
                view._zero_padding = True
        self.averaged_gradients[index] = GradPartitionBufferGroup(views, buffer)
        self.free_grad_in_param_list(self.params_in_partition[index])

    def _autoep_masters(self):
        """This rank's fp32 parameters."""
        for index, partition in enumerate(self.single_partition_of_fp32_groups):
            for place, piece in self._autoep_pieces(index):
                values = partition.detach().view(-1)[place : place + piece.gradient.numel()]
                yield GradientSlice(values, piece.parameter, piece.shards)

    # The TP rule on buckets

    def average_tensor(self, tensor, communication_data_type):
        """A contiguous bucket, before its reduction over data."""
        if self.ipg_buckets[communication_data_type].params and self._autoep_corrects_buckets():
            self._autoep_due = communication_data_type
        super().average_tensor(tensor, communication_data_type)
        if self._autoep_due is not None:
            raise UnsupportedError("DeepSpeed reduced a bucket in a way unknown to this version")

    _autoep_due = None  # dtype of the bucket that average_tensor() is about to reduce

    def _record_gradient_stream(self, tensor, stream):
        """DeepSpeed calls this first thing on the reduction stream, after the backward stream has waited for the buckets before:
        work queued from here on runs beside the backward pass."""
        super()._record_gradient_stream(tensor, stream)
        if self._autoep_due is not None:
            dtype, self._autoep_due = self._autoep_due, None
            self._autoep_correct_bucket(dtype)

    def reduce_ipg_grads(self, comm_dtype=None):
        if not self.contiguous_gradients and self._autoep_corrects_buckets():
            for dtype in list(self.ipg_buckets) if comm_dtype is None else [comm_dtype]:
                if self.ipg_buckets[dtype].params:
                    self._autoep_correct_scattered_bucket(dtype)
        super().reduce_ipg_grads(comm_dtype)

    def _autoep_corrects_buckets(self) -> bool:
        """Decided at the first bucket of an optimizer step. A step whose first backward pass is not its last is corrected
        on the partition: once, where its buckets would be many times."""
        if self._autoep_place_now is None:
            once = self.is_gradient_accumulation_boundary()
            self._autoep_place_now = "bucket" if self.autoep_place == "bucket" and once else "partition"
        return self._autoep_place_now == "bucket"

    def _autoep_correct_scattered_bucket(self, dtype: torch.dtype) -> None:
        """contiguous_gradients=false: DeepSpeed waits for the whole device before each reduction, so this may, too."""
        accelerator = get_accelerator()
        waits = self.overlap_comm and not accelerator.resolves_data_dependency()
        if waits:
            accelerator.synchronize()  # it does not note which streams made these gradients
        with accelerator.stream(self.reduction_stream if self.overlap_comm else accelerator.current_stream()):
            self._autoep_correct_bucket(dtype)
        if waits:  # gradients are divided by dp on the current stream next
            accelerator.current_stream().wait_stream(self.reduction_stream)

    def _autoep_correct_bucket(self, dtype: torch.dtype) -> None:
        """On the current stream."""
        parameters = [self.bit16_groups[group][place] for group, place, _ in self.ipg_buckets[dtype].params]
        self.autoep_sync.correct(
            [
                self.autoep_sync.slice_of(gradient, parameter)
                for gradient, parameter in zip(self._autoep_bucket_gradients(dtype, parameters), parameters, strict=True)
            ]
        )

    def _autoep_bucket_gradients(self, dtype: torch.dtype, parameters) -> list[torch.Tensor]:
        bucket = self.ipg_buckets[dtype]
        if self.contiguous_gradients and dtype not in self.extra_large_param_to_reduce:
            return list(bucket.buffer[bucket.index][: bucket.elements].split([parameter.numel() for parameter in parameters]))
        for gradient in bucket.grads:
            if not gradient.is_contiguous():
                gradient.data = gradient.data.contiguous()
        return [gradient.data for gradient in bucket.grads]

    # The statistics in the place of DeepSpeed's norm and overflow check

    def has_overflow(self, partition_gradients=True) -> bool:
        """One decision for the stage: some rank's gradient is not finite."""
        return not self._autoep_statistics.is_finite

    def scaled_global_norm(self, norm_type=2) -> torch.Tensor:
        """Norm of the (loss-scaled) gradients, for the clipping and the report of DeepSpeed's step."""
        if norm_type != 2:
            raise UnsupportedError(f"norm_type={norm_type!r} is not supported: legal is 2")
        value = self._autoep_statistics.norm if self._autoep_statistics.is_finite else -1.0  # DeepSpeed's "not finite"
        return torch.tensor(value, dtype=torch.float32, device=self.single_partition_of_fp32_groups[0].device)

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


def fold_zero_optimizer(
    optimizer: DeepSpeedZeroOptimizer,
    sync: GradientSync,
    place: str,
    contiguous_gradients: bool,
    mixed: MixedPrecision | None = None,
) -> None:
    """Swap the class of a freshly built ZeRO-1/2 optimizer. ``mixed``: where its parameters are of two dtypes.

    Raises :class:`UnsupportedError` for any other type.
    """
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        raise UnsupportedError(f"optimizer {type(optimizer).__name__} is not supported: legal is ZeRO stage 1 or 2")
    optimizer.__class__ = FoldedZeroOptimizer
    optimizer.autoep_sync = sync
    optimizer.autoep_place = place
    optimizer.check_grad_overflow = True  # skip a non-finite step in every dtype; the statistics know already
    # DeepSpeed asserts true for MoE when it builds ZeRO-2; NoncontiguousReduction makes false right.
    optimizer.contiguous_gradients = contiguous_gradients
    if mixed is not None:
        optimizer.autoep_mix(mixed)
